"""How a `mooncake_master` is started and asked for its health. Pure: whoever launches it runs and watches it."""

from __future__ import annotations

from dataclasses import dataclass

from store.addresses import authority


@dataclass(frozen=True, kw_only=True)
class MasterSettings:
    """One master.

    Attributes:
        host: address that both its ports bind to; they have no authentication.
        rpc_port: for clients (`MooncakeConfig.master`).
        metrics_port: HTTP: `/health`, `/metrics`, `/get_all_segments`, `/query_key?key=`.
        lease_s: how long a read pins an object. It must outlast one transfer, and what was read or checked within it
            cannot be evicted, so a long one fills the store.
        client_ttl_s: silence after which a client's memory, and what lies in it, is forgotten.
        put_discard_s: after that long another writer may take over a key whose writer died in the middle.
        put_release_s: after that long the space of such a put is reused. Its writer may yet be writing: keep it long.
        eviction_watermark: share of the memory above which the oldest objects go.
    """

    host: str = "127.0.0.1"
    rpc_port: int
    metrics_port: int
    lease_s: float = 3.0
    client_ttl_s: int = 10
    put_discard_s: int = 5
    put_release_s: int = 30
    eviction_watermark: float = 0.9


def master_command(settings: MasterSettings, executable: str = "mooncake_master") -> list[str]:
    """Its argv. It exits 1 when a port is taken, 0 on SIGTERM, and logs to stderr."""
    return [
        executable,
        f"--rpc_address={settings.host}",
        f"--rpc_port={settings.rpc_port}",
        f"--metrics_host={settings.host}",
        f"--metrics_port={settings.metrics_port}",
        f"--default_kv_lease_ttl={round(settings.lease_s * 1000)}",
        f"--client_ttl={settings.client_ttl_s}",
        f"--put_start_discard_timeout_sec={settings.put_discard_s}",
        f"--put_start_release_timeout_sec={settings.put_release_s}",
        f"--eviction_high_watermark_ratio={settings.eviction_watermark}",
        "--logtostderr",
    ]


def health_url(settings: MasterSettings) -> str:
    """Answers `service_ready` once it serves, 0.1 to 0.5 s after the start. Clients' `health_check` is not to be
    trusted: it says 0 with the master gone."""
    return f"http://{authority(settings.host, settings.metrics_port)}/health"


def rpc_address(settings: MasterSettings) -> str:
    """What clients are given as `MooncakeConfig.master`."""
    return authority(settings.host, settings.rpc_port)
