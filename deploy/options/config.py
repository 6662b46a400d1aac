"""What one deployment is configured with: built once from defaults, a YAML file and flags, validated once, frozen.

The fields are the single list of options: the CLI makes a flag of each, the YAML file has the same names. What the
stages' vLLM takes goes through `stage_args`, what the proxy takes through `proxy`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from deploy.host.ending import MAX_DRAIN_S
from deploy.options.addresses import check_name, host_and_port, port_range
from deploy.options.engines import ENGINES
from deploy.options.suggestions import unknown
from epd_serve.core_shares import parse_core_shares
from epd_serve.engine.kv.grouping_file import PREFIX, open_grouping
from epd_serve.errors import ConfigError
from epd_serve.kv.faults import Faults

CPU_PARALLEL_STARTS = 0
"""Stages that start at once on CPU; 0 = all. Imports dominate a start and share the page cache."""

LEAST_SEGMENT_MIB = 16
"""Mooncake's own bound (`store.mooncake.client.LEAST_SEGMENT_BYTES`); a stage would find it half a minute in."""

MAX_WORKERS = 64

LAME_DUCK_S = 5.0
"""Load balancers ask every few seconds whether a server is ready."""

_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, field-name


def _option(default: Any, help: str, **extra: Any) -> Any:
    return field(default=default, metadata={"help": help, **extra})


@dataclass(frozen=True)
class DeployConfig:
    """Options of `epd-serve serve`. Sizes in MiB, times in seconds."""

    model: str = _option("", "model directory or hub name (default: the built-in demo model)", positional=True)
    layout: str = _option("(E-P)-D", "stages and devices, for example (E-P)-D, E-PD, TP1 (see epd-serve layout)")
    engine: str = _option("vllm", "what runs the stages: vLLM, or a simulation of it", choices=ENGINES)
    sim_profile: str = _option("", "latencies and capacity of simulated stages (JSON, docs/guides/simulation.md)")
    switchable: bool = _option(
        False, "P and D have both halves of the KV connector: either can become the other without a restart"
    )
    device: str = _option("auto", "device kind", choices=("auto", "npu", "cuda", "cpu"))
    runtime: str = _option(
        "local", "what runs the stages: this machine, or the nodes of a Ray cluster", choices=("local", "ray")
    )
    name: str = _option("epd", "of the deployment on its Ray cluster, which may have several")
    ray_address: str = _option(
        "auto", "HOST:PORT of the Ray cluster's head (auto: RAY_ADDRESS, or the cluster of this machine)"
    )
    placement: str = _option(
        "pack",
        "nodes that groups of a layout get: as few as can be, several where there is room, or one each",
        choices=("pack", "spread", "strict_spread"),
    )
    fronts: str = _option(
        "auto",
        "nodes with front doors: the one where serve was called, every one, or auto: every one where there are several",
        choices=("auto", "here", "every"),
    )
    node_host: str = _option(
        "", "network interface whose address stages of a node bind (default: the address by which Ray knows it)"
    )
    node_ports: str = _option("20000-24999", "ports that stages of a node may take, FIRST-LAST")
    share_devices: bool = _option(
        False, "where a layout wants more devices than there are, place it on those in turn (to try it, not to be fast)"
    )
    core_share: str = _option(
        "",
        "parts of a device's cores for stages that share it, as E=0.3,P=0.7, or E0=…, or auto (default: no limit)",
    )
    host: str = _option("127.0.0.1", "address of the OpenAI endpoint")
    port: int = _option(8000, "port of the OpenAI endpoint")
    admin_port: int = _option(0, "port of /metrics and /instances, which then leave the clients' port")
    admin_host: str = _option("127.0.0.1", "address of that port")
    admin_key_file: str = _option("", "file with the key that they want; needed beyond loopback")
    workers: int = _option(1, "proxy processes; several share one port and one view of the stages")
    served_model_name: str = _option("", "name clients use (default: the model directory's name)")
    stage_args: tuple[str, ...] = _option(
        (), "vLLM flags for a role or an instance, as 'P:--max-num-seqs 8' or 'D0:…' or 'all:…'; repeatable", many=True
    )
    proxy: tuple[str, ...] = _option(
        (), "a proxy setting, as KEY=VALUE, for example media.max_bytes=1000000; repeatable", many=True
    )
    api_key_file: str = _option(
        "", "clients need a key of this file (epd-serve key), which is read again whenever it changes"
    )
    tls_cert_file: str = _option(
        "", "the front doors talk HTTPS with this certificate and its chain (PEM), read again when it changes"
    )
    tls_key_file: str = _option("", "the key of that certificate (PEM, without a passphrase)")
    media_root: str = _option("", "directory that file:// images may be read from (default: none)")
    allow_private_media: bool = _option(False, "let image URLs reach private and loopback addresses")
    arena_mib: int = _option(256, "shared memory for features (MM Store tier 1)")
    mm_store: str = _option(
        "auto",
        "where features lie: arena (this host's shared memory), mooncake (arena and Mooncake Store), "
        "auto (arena; with Mooncake on several nodes or when --mooncake-master is given); NPUs have the arena alone",
        choices=("auto", "arena", "mooncake"),
    )
    mooncake_master: str = _option("", "HOST:PORT of a running mooncake_master (default: start one if it is needed)")
    mooncake_segment_mib: int = _option(512, "memory that each encoder gives to the Mooncake Store")
    on_missing_feature: str = _option(
        "recompute",
        "what a request whose feature is lost does: recompute it at its prefill instance, or reencode it first",
        choices=("recompute", "reencode"),
    )
    send_pixels: str = _option(
        "auto", "send images to prefill and decode: only where needed (auto), or always", choices=("auto", "always")
    )
    first_token: str = _option(
        "prefill",
        "which stage a stream's first token is from where prefill and decode are apart: prefill, as soon as it is "
        "there, or decode, to compare with",
        choices=("prefill", "decode"),
    )
    tenant_header: str = _option("", "header that names the tenant, set by a gateway you trust (default: the API key)")
    shared_features: bool = _option(False, "let tenants use each other's features")
    recompute_limit: int = _option(2, "requests with lost features that one instance recomputes at a time")
    feature_prefetch: str = _option(
        "event", "fetch features when announced, or on demand, to compare with", choices=("event", "demand")
    )
    partial_prefill: str = _option(
        "on", "prefill a request up to its first image that is not encoded yet, or wait for all", choices=("on", "off")
    )
    kv_transport: str = _option("auto", "how KV travels P→D", choices=("auto", "shm", "mooncake"))
    mooncake_protocol: str = _option("tcp", "Mooncake's protocol (NPUs always use ascend)", choices=("tcp", "rdma"))
    kv_grouping: str = _option("adaptive", "layers per KV packet: adaptive, fixed:N, layerwise or bulk")
    kv_packet_floor_kib: int = _option(1024, "KV packets smaller than this are joined where that is possible")
    kv_staging_mib: int = _option(64, "shared memory per KV link (sending worker and receiver)")
    start_checks: str = _option(
        "refuse",
        "what a machine that cannot serve gets (missing CANN, a driver that does not fit, wrong packages)",
        choices=("refuse", "warn"),
    )
    startup_timeout_s: float = _option(900.0, "deadline for one stage to become ready")
    lame_duck_s: float = _option(
        LAME_DUCK_S, "how long requests are still accepted after SIGTERM, while /ready says no"
    )
    drain_s: float = _option(30.0, "how long requests in flight may go on after that")
    parallel_starts: int = _option(CPU_PARALLEL_STARTS, "stages that start at once on CPU (0 = all)")
    stage_template: str = _option(
        "auto",
        "start stages as forks of a process that has imported what they need: on CPU (auto), on every device, or never",
        choices=("auto", "always", "never"),
    )
    kv_faults: str = _option("", "what goes wrong on purpose (epd_serve/kv/faults.py)", hidden=True)
    trace_dir: str = _option("", "directory for per-stage phase stamps (JSON lines)")
    otlp_traces_endpoint: str = _option(
        "", "collector that takes OpenTelemetry traces of front doors and stages: http://HOST:4318/v1/traces"
    )
    run_root: str = _option("", "directory for run directories (default: XDG_RUNTIME_DIR or /tmp)", hidden=True)

    def __post_init__(self) -> None:
        for option in fields(self):
            choices = option.metadata.get("choices")
            if choices and getattr(self, option.name) not in choices:
                raise ConfigError(unknown(option.name, getattr(self, option.name), choices), param=option.name)
        if not 1 <= self.port <= 65535:
            raise ConfigError(f"port {self.port} is not between 1 and 65535", param="port")
        check_admin_port(self.admin_port, self.port)
        check_workers(self.workers)
        positive = ("arena_mib", "kv_packet_floor_kib", "kv_staging_mib", "startup_timeout_s")
        for name in (*positive, "recompute_limit"):
            if not (getattr(self, name) > 0 and math.isfinite(getattr(self, name))):
                raise ConfigError(f"{name} is {getattr(self, name)}; it has to be positive", param=name)
        self._check_cluster()
        parse_core_shares(self.core_share)
        _check_grouping(self.kv_grouping, self.kv_packet_floor_kib)
        Faults(self.kv_faults)
        check_segment(self.mooncake_segment_mib)
        check_drain(self.lame_duck_s, "lame_duck_s")
        check_drain(self.drain_s)
        if self.parallel_starts < 0:
            raise ConfigError("parallel_starts is negative; 0 means all at once", param="parallel_starts")
        if self.media_root and not Path(self.media_root).is_dir():
            raise ConfigError(f"media_root {self.media_root} is not a directory", param="media_root")
        if self.mooncake_master:
            host_and_port(self.mooncake_master)
            if self.mm_store == "arena":
                raise ConfigError(
                    "mooncake_master is given, but mm_store is arena; use --mm-store mooncake", param="mm_store"
                )
        if self.tenant_header and not _HEADER.fullmatch(self.tenant_header):
            raise ConfigError(f"tenant_header {self.tenant_header!r} is no header name", param="tenant_header")

    def _check_cluster(self) -> None:
        check_name(self.name)
        if "//" in self.ray_address:
            raise ConfigError(
                f"ray_address {self.ray_address}: Ray Client is not taken; give HOST:PORT of the head, and call this "
                "on a node of the cluster",
                param="ray_address",
            )
        if self.ray_address != "auto":
            host_and_port(self.ray_address, "ray_address")
        port_range(self.node_ports)
        default = {option.name: option.default for option in fields(self)}
        for name in ("placement", "fronts", "node_host"):
            if self.runtime == "local" and getattr(self, name) != default[name]:
                raise ConfigError(f"{name} {getattr(self, name)} is for --runtime ray", param=name)
        if self.runtime == "ray" and self.share_devices:
            raise ConfigError("share_devices is for one machine: Ray lends whole devices", param="share_devices")


def check_admin_port(admin_port: int, port: int) -> None:
    """Raises ConfigError when an admin listener cannot be there. 0 means none."""
    if not 0 <= admin_port <= 65535:
        raise ConfigError(f"admin_port {admin_port} is not between 1 and 65535", param="admin_port")
    if admin_port and admin_port == port:
        raise ConfigError(f"admin_port {admin_port} is the clients' port; give another", param="admin_port")


def check_workers(count: int) -> None:
    """Raises ConfigError when so many proxy processes cannot run."""
    if not 1 <= count <= MAX_WORKERS:
        raise ConfigError(f"workers is {count}; between 1 and {MAX_WORKERS} proxy processes can run", param="workers")


def _check_grouping(text: str, floor_kib: int) -> None:
    try:
        open_grouping(text, floor_kib << 10)
    except ConfigError as error:
        hint = "" if text.startswith(PREFIX) else ", with N from 1 on"
        raise ConfigError(f"kv_grouping {error}{hint}", param="kv_grouping") from error


def check_drain(seconds: float, name: str = "drain_s") -> None:
    """Raises ConfigError when an end cannot take this long."""
    if not 0 <= seconds <= MAX_DRAIN_S:
        raise ConfigError(f"{name} is {seconds:g}; it has to be between 0 and {MAX_DRAIN_S:g}", param=name)


def check_segment(mib: int) -> None:
    """Raises ConfigError when Mooncake takes no segment of this size."""
    if mib < LEAST_SEGMENT_MIB:
        raise ConfigError(
            f"mooncake_segment_mib is {mib}; Mooncake takes no segment below {LEAST_SEGMENT_MIB}",
            param="mooncake_segment_mib",
        )


def build_config(flags: Mapping[str, Any], config_file: str | None = None) -> DeployConfig:
    """Defaults, then the file, then the flags that were given.

    Raises:
        ConfigError: unreadable file, unknown key (names the nearest), wrong type or bound.
    """
    values = read_config_file(config_file) if config_file else {}
    values.update(flags)
    return DeployConfig(**values)


def read_config_file(path: str) -> dict[str, Any]:
    """Options of a YAML file, types checked. Dashes and underscores in keys are the same."""
    import yaml

    try:
        raw = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"config file {path} does not exist", param="--config") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"config file {path}: {' '.join(str(error).split())}", param="--config") from error
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise ConfigError(f"config file {path} holds no mapping of options", param="--config")
    options = {option.name: option for option in fields(DeployConfig)}
    values = {}
    for key, value in raw.items():
        name = str(key).replace("-", "_")
        if name not in options:
            raise ConfigError(f"config file {path}: {unknown('key', str(key), options)}", param="--config")
        values[name] = _typed(path, name, value, options[name].default)
    return values


def _typed(path: str, name: str, value: Any, default: Any) -> Any:
    """The value as the option's type; YAML already made numbers, booleans and lists."""
    if isinstance(default, tuple):
        if isinstance(value, dict):  # stage_args: {P: --flag …}, proxy: {media.max_bytes: 1}
            joiner = ":" if name == "stage_args" else "="
            return tuple(f"{key}{joiner}{item}" for key, item in value.items())
        entries = value if isinstance(value, list) else [value]
        return tuple(str(entry) for entry in entries)
    if name == "core_share" and isinstance(value, dict):
        return ",".join(f"{key}={share}" for key, share in value.items())  # {E: 0.3, P: 0.7}
    if isinstance(default, bool):
        fits = isinstance(value, bool)
    elif isinstance(default, float):
        fits = isinstance(value, int | float) and not isinstance(value, bool)
    else:
        fits = isinstance(value, type(default)) and not isinstance(value, bool)
    if not fits:
        raise ConfigError(
            f"config file {path}: {name} is {value!r}; expected {type(default).__name__}, for example {default!r}",
            param="--config",
        )
    return float(value) if isinstance(default, float) else value
