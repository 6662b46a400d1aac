"""What one deployment is configured with: built once from defaults, a YAML file, the environment and flags, validated
once, frozen. One tree (`proxy/config/tree.py`) for `epd-serve serve` and `epd-serve proxy`, with all that the proxy
takes in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta

from deploy.host.ending import MAX_DRAIN_S
from deploy.host.environment import environment
from deploy.options.addresses import check_name, host_and_port, port_range
from epd_serve.core_shares import parse_core_shares
from epd_serve.engine.kv.grouping_file import PREFIX, open_grouping
from epd_serve.errors import ConfigError, LayoutError
from epd_serve.kv.faults import Faults
from epd_serve.layout_parser import parse
from proxy.config.settings import ProxyOptions
from proxy.config.tree import Count, CountFrom0, Port, changed, find, settings_of

LEAST_SEGMENT_MIB = 16
"""Mooncake's own bound (`store.mooncake.client.LEAST_SEGMENT_BYTES`); a stage would find it half a minute in."""

Ending = Annotated[float, Meta(ge=0, le=MAX_DRAIN_S)]


@dataclass(frozen=True)
class EndpointConfig(ProxyOptions):
    """The OpenAI endpoint: where it listens, who may call it, how it ends.

    Attributes:
        served_model_name: name that clients use (default: the name of the model's directory).
        host: address of the OpenAI endpoint.
        port: port of the OpenAI endpoint.
        workers: proxy processes; several share one port and one view of the stages.
        api_key_file: clients need a key of this file (epd-serve key), which is read again whenever it changes.
        tls_cert_file: the endpoint talks HTTPS with this certificate and its chain (PEM), read again when it changes.
        tls_key_file: the key of that certificate (PEM, without a passphrase).
        admin_port: port of /metrics and /instances, which then leave the clients' port; 0 for none.
        admin_host: address of that port.
        admin_key_file: file with the key that they want; needed beyond loopback.
        lame_duck_s: how long requests are still accepted after SIGTERM, while /ready says no. Load balancers ask every
            few seconds.
        drain_s: how long requests in flight may go on after that.
    """

    served_model_name: str = ""
    host: str = "127.0.0.1"
    port: Port = 8000
    workers: Annotated[int, Meta(ge=1, le=64)] = 1
    api_key_file: str = ""
    tls_cert_file: str = ""
    tls_key_file: str = ""
    admin_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    admin_host: str = "127.0.0.1"
    admin_key_file: str = ""
    lame_duck_s: Ending = 5.0
    drain_s: Ending = 30.0
    run_root: str = field(default="", metadata={"hidden": True})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.admin_port == self.port:
            raise ConfigError(f"admin_port {self.admin_port} is the clients' port; give another", param="admin_port")
        if bool(self.tls_cert_file) is not bool(self.tls_key_file):
            raise ConfigError("--tls-cert-file and --tls-key-file go together", param="tls_cert_file")
        if (root := self.media.allowed_local_root) and not Path(root).is_dir():
            raise ConfigError(f"media_root {root} is not a directory", param="media_root")


@dataclass(frozen=True)
class ProxyConfig(EndpointConfig):
    """Settings of `epd-serve proxy`.

    Attributes:
        stages: file that names the stages and the model (docs/guides/proxy.md).
        stage: one stage, in place of a file: PD=http://HOST:PORT or PD=unix:/PATH, with it E=http://HOST:PORT for an
            encoder, or a URL alone for a whole model; repeatable.
        stage_key_file: the key that the stages want.
    """

    stages: str = ""
    stage: tuple[str, ...] = field(default=(), metadata={"repeatable": True})
    stage_key_file: str = ""


@dataclass(frozen=True)
class DeployConfig(EndpointConfig):
    """Settings of `epd-serve serve`. Sizes in MiB or KiB and times in seconds, as the names say.

    Attributes:
        model: model directory or hub name (default: the built-in demo model).
        layout: stages and devices, for example (E-P)-D, E-PD, TP1 (see epd-serve layout).
        engine: what runs the stages: vLLM, or a simulation of it.
        sim_profile: latencies and capacity of simulated stages (JSON, docs/guides/simulation.md).
        encoder_free: P, D and PD load no encoder, whose memory their KV cache gets: E encodes all, and again what gets
            lost. For vLLM 0.32 and families that take metadata in place of media (docs/reference/models.md).
        switchable: P and D have both halves of the KV connector: either can become the other without a restart.
        device: device kind.
        runtime: what runs the stages: this machine, the nodes of a Ray cluster, or the pods of a Kubernetes cluster.
        name: of the deployment on its Ray cluster, which may have several.
        ray_address: HOST:PORT of the Ray cluster's head (auto: RAY_ADDRESS, or the cluster of this machine).
        placement: nodes that groups of a layout get: as few as can be, several where there is room, or one each.
        fronts: nodes with front doors: the one where serve was called, every one, or auto: every one but those that
            have come since --follow asked for nodes.
        node_host: network interface whose address stages of a node bind (default: the address by which Ray knows it).
        node_ports: ports that stages of a node may take, FIRST-LAST.
        node_secrets: folder, under the same name on every host, with what the nodes of a deployment show each other:
            tls.crt, tls.key and token, and ca.crt where another one has signed them (docs/guides/several-hosts.md).
        share_devices: where a layout wants more devices than there are, place it on those in turn (to try it, not to be
            fast).
        core_share: parts of a device's cores for stages that share it, as E=0.3,P=0.7, or E0=…, or auto (default: no
            limit).
        stage_args: flags of vLLM for a role or an instance, as 'P:--max-num-seqs 8' or 'D0:…' or 'all:…'; repeatable.
        arena_mib: shared memory for features on each host, MM Store tier 1 (0: a 64th of the host's memory per encoder,
            from 256 MiB to 8 GiB, as far as /dev/shm has it).
        feature_slab: on who prefills, copy features to the device ahead of the steps that read them, or in these steps.
        feature_slab_mib: device memory for that in each worker (0: twice what vLLM's encoder cache holds).
        feature_transfer: how features come to who prefills: from the store, or written to its device by the encoder's
            (Mooncake's Transfer Engine; the store has them, too).
        mm_store: where features lie: arena (this host's shared memory), mooncake (arena and Mooncake Store), auto
            (arena; with Mooncake on several nodes, but of NPUs, or when --mooncake-master is given).
        mooncake_master: HOST:PORT of a running mooncake_master (default: start one if it is needed).
        mooncake_segment_mib: memory that each encoder gives to the Mooncake Store.
        recompute_limit: requests with lost features that one instance recomputes at a time.
        feature_prefetch: fetch features when announced, or on demand, to compare with.
        partial_prefill: prefill a request up to its first image that is not encoded yet, or wait for all.
        step_budgets: hold steps of the stages to the SLO where slo.ttft_s or slo.tpot_s names one, or leave them to
            vLLM.
        follow: have instances where the load is: change the layout as it comes and goes, only say what would be changed
            (epd-serve status --why), or leave it alone.
        follow_profile: of the devices (epd-serve profile), for what stages have not shown yet (default: sim_profile, if
            it is one).
        follow_min: least instances, as E=1,P=2 or (E-P)=1 (default: one of each group of the layout).
        follow_max: most instances, in the same form (default: as many as fit).
        follow_devices: most devices (0: all of this deployment's nodes; on CPU, as many as the layout has).
        follow_use: share of its time that an instance may be busy and still keep the SLO.
        follow_every_s: between two decisions.
        follow_quiet_s: for how long fewer must have been enough before any is given up.
        follow_relayout: other groups, too, where the planner finds ones that suit what comes much better (needs a
            profile; not with encoder_free), or only other counts of those that there are.
        kv_transport: how KV travels P→D.
        mooncake_protocol: Mooncake's protocol (NPUs always use ascend).
        kv_grouping: layers per KV packet: adaptive, fixed:N, layerwise or bulk.
        kv_packet_floor_kib: KV packets smaller than this are joined where that is possible.
        kv_staging_mib: shared memory per KV link (sending worker and receiver).
        start_checks: what a machine that cannot serve gets (missing CANN, a driver that does not fit, wrong packages).
        startup_timeout_s: deadline for one stage to become ready.
        parallel_starts: stages that start at once on CPU (0 = all). Imports dominate a start and share the page cache.
        stage_template: start stages as forks of a process that has imported what they need: on CPU (auto), on every
            device, or never.
        trace_dir: directory for phase stamps of each stage and of the proxy (JSON lines).
        kv_faults: what goes wrong on purpose (epd_serve/kv/faults.py).
    """

    model: str = field(default="", metadata={"positional": True})
    layout: str = "(E-P)-D"
    engine: Literal["vllm", "sim"] = "vllm"
    sim_profile: str = ""
    encoder_free: bool = False
    switchable: bool = False
    device: Literal["auto", "npu", "cuda", "cpu"] = "auto"
    runtime: Literal["local", "ray", "kubernetes"] = "local"
    name: str = "epd"
    ray_address: str = "auto"
    placement: Literal["pack", "spread", "strict_spread"] = "pack"
    fronts: Literal["auto", "here", "every"] = "auto"
    node_host: str = ""
    node_ports: str = "20000-24999"
    node_secrets: str = ""
    share_devices: bool = False
    core_share: str = ""
    stage_args: tuple[str, ...] = field(default=(), metadata={"repeatable": True})
    arena_mib: CountFrom0 = 0
    feature_slab: Literal["on", "off"] = "on"
    feature_slab_mib: CountFrom0 = 0
    feature_transfer: Literal["store", "device"] = "store"
    mm_store: Literal["auto", "arena", "mooncake"] = "auto"
    mooncake_master: str = ""
    mooncake_segment_mib: Annotated[int, Meta(ge=LEAST_SEGMENT_MIB)] = 512
    recompute_limit: Count = 2
    feature_prefetch: Literal["event", "demand"] = "event"
    partial_prefill: Literal["on", "off"] = "on"
    step_budgets: Literal["on", "off"] = "on"
    follow: Literal["off", "advise", "act"] = "off"
    follow_profile: str = ""
    follow_min: str = ""
    follow_max: str = ""
    follow_devices: CountFrom0 = 0
    follow_use: Annotated[float, Meta(gt=0, le=1)] = 0.7
    follow_every_s: Annotated[float, Meta(ge=1, le=3600)] = 5.0
    follow_quiet_s: Annotated[float, Meta(ge=10, le=86400)] = 300.0
    follow_relayout: Literal["on", "off"] = "on"
    kv_transport: Literal["auto", "shm", "mooncake"] = "auto"
    mooncake_protocol: Literal["tcp", "rdma"] = "tcp"
    kv_grouping: str = "adaptive"
    kv_packet_floor_kib: Count = 1024
    kv_staging_mib: Count = 64
    start_checks: Literal["refuse", "warn"] = "refuse"
    startup_timeout_s: Annotated[float, Meta(gt=0, le=1e6)] = 900.0
    parallel_starts: CountFrom0 = 0
    stage_template: Literal["auto", "always", "never"] = "auto"
    trace_dir: str = ""
    kv_faults: str = field(default="", metadata={"hidden": True})

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_cluster()
        parse_core_shares(self.core_share)
        _check_grouping(self.kv_grouping, self.kv_packet_floor_kib)
        for key in ("follow_min", "follow_max"):
            group_counts(getattr(self, key), key)
        Faults(self.kv_faults)
        if self.encoder_free and self.send_pixels == "always":
            raise ConfigError(
                "--encoder-free: stages without an encoder take no media; leave send_pixels=always away",
                param="encoder_free",
            )
        if self.send_pixels == "never" and not self.encoder_free:
            raise ConfigError(
                "send_pixels=never is for stages without an encoder; serve them with --encoder-free",
                param="send_pixels",
            )
        if self.mooncake_master:
            host_and_port(self.mooncake_master)
            if self.mm_store == "arena":
                raise ConfigError(
                    "mooncake_master is given, but mm_store is arena; use --mm-store mooncake", param="mm_store"
                )

    @property
    def slab_bytes(self) -> int | None:
        """Of the slab for features of each worker that prefills; 0: the usual size, None: none is taken."""
        return self.feature_slab_mib << 20 if self.feature_slab == "on" else None

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
        for name in ("placement", "fronts", "node_host"):
            if self.runtime == "local" and getattr(self, name) != getattr(DeployConfig, name):
                raise ConfigError(f"{name} {getattr(self, name)} is for --runtime ray or kubernetes", param=name)
        if self.runtime != "local" and self.share_devices:
            raise ConfigError("share_devices is for one machine: others lend whole devices", param="share_devices")
        if self.runtime == "kubernetes" and self.fronts == "here":
            raise ConfigError("fronts here: the controller's pod has no front doors; take every", param="fronts")
        if self.runtime == "kubernetes" and self.device == "auto" and self.engine != "sim":
            raise ConfigError("--device auto: nobody sees the pods' from here; say npu, cuda or cpu", param="device")


def group_counts(text: str, key: str) -> Mapping[str, int]:
    """Reads `E=1,(E-P)=2`: copies by group, as one copy stands in a layout. Raises ConfigError: not of that form."""
    counts = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, count = part.rpartition("=")
        try:
            groups = parse(name).groups
        except LayoutError:
            groups = ()
        if len(groups) != 1 or groups[0].repeat != 1 or not count.isdecimal():
            raise ConfigError(f"{key} {part!r}: write GROUP=COUNT, as E=1,P=2 or (E-P)=1", param=key)
        counts[str(groups[0])] = int(count)
    return counts


def _check_grouping(text: str, floor_kib: int) -> None:
    try:
        open_grouping(text, floor_kib << 10)
    except ConfigError as error:
        hint = "" if text.startswith(PREFIX) else ", with N from 1 on"
        raise ConfigError(f"kv_grouping {error}{hint}", param="kv_grouping") from error


C = TypeVar("C", bound=EndpointConfig)


def build_config(flags: Mapping[str, Any], config_file: str | None = None, owner: type[C] = DeployConfig) -> C:  # type: ignore[assignment]
    """Defaults, then the file, then the environment (`EPD_PORT`), then the flags that were given.

    Args:
        flags: by key. `proxy`: entries KEY=VALUE.
        owner: whose settings they are.

    Raises:
        ConfigError: unreadable file, unknown key (names the nearest), wrong type or bound.
    """
    tree: type = owner
    known = settings_of(tree)
    values = read_config_file(config_file, owner) if config_file else {}
    for key, setting in known.items():
        variable = variable_of(key)
        if key not in flags and (text := environment().get(variable)):
            values[key] = setting.typed(text, variable)
    for key, value in flags.items():
        if key != "proxy":
            values[key] = known[key].typed(value, flag_of(key))
    return changed(owner(), values | proxy_values(flags.get("proxy", ())))


def flag_of(key: str) -> str:
    """The flag of a setting."""
    return "--" + key.replace("_", "-")


def variable_of(key: str) -> str:
    """The variable of the environment that sets it; an empty one does not."""
    return "EPD_" + key.upper().replace(".", "_")


def proxy_values(entries: Iterable[str], owner: type = ProxyOptions, what: str = "proxy setting") -> dict[str, Any]:
    """Entries KEY=VALUE of `--proxy` as values by key; those of a repeatable one together.

    Raises:
        ConfigError: no `=`, unknown key (names the nearest), wrong type or bound.
    """
    values: dict[str, Any] = {}
    for entry in entries:
        key, equals, text = entry.partition("=")
        if not equals:
            raise ConfigError(f"{what} {entry!r} is not KEY=VALUE", param=f"--{what.split()[0]}")
        setting = find(owner, key, what)
        value = setting.typed(text.strip(), f"{what} {key}")
        values[setting.key] = values.get(setting.key, ()) + value if setting.notes.get("repeatable") else value
    return values


def read_config_file(path: str, owner: type[EndpointConfig] = DeployConfig) -> dict[str, Any]:
    """Values of a YAML file by key, types checked. A setting of a section is `section.name`, or `name` in a mapping of
    it; what the proxy takes may stand in one called `proxy`. Dashes and underscores in keys are the same.
    """
    import yaml

    try:
        raw = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"config file {path} does not exist", param="--config") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"config file {path}: {' '.join(str(error).split())}", param="--config") from error
    if not isinstance(raw or {}, dict):
        raise ConfigError(f"config file {path} holds no mapping of options", param="--config")
    try:
        return dict(_flat(owner, raw or {}))
    except ConfigError as error:
        raise ConfigError(f"config file {path}: {error}", param="--config") from error


def _flat(owner: type, raw: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    sections = {key.partition(".")[0] for key in settings_of(owner) if "." in key}
    for word, value in raw.items():
        key = f"{section}{word}".replace("-", "_")
        if key == "proxy" and not isinstance(value, dict):
            entries = value if isinstance(value, list) else [value] if value else []
            yield from proxy_values(map(str, entries)).items()
        elif key == "proxy":
            yield from _flat(ProxyOptions, value)
        elif key in sections and isinstance(value or {}, dict):
            yield from _flat(owner, value or {}, f"{key}.")
        else:
            setting = find(owner, key, "key")
            if isinstance(value, dict) and key == "stage_args":
                value = [f"{target}:{flags}" for target, flags in value.items()]  # {P: --max-num-seqs 8}
            elif isinstance(value, dict) and key == "core_share":
                value = ",".join(f"{target}={share}" for target, share in value.items())  # {E: 0.3, P: 0.7}
            yield setting.key, setting.typed(value, key)
