"""How one stage is wired to the rest of its launch: the JSON that travels in vLLM's connector extra config.

The launcher builds a `StageWiring` per instance and passes it, under the key `epd`, in
`ec_connector_extra_config` and `kv_connector_extra_config`; the connectors parse it back. The scheduler, which every
role has, gets it by the environment (`epd_serve/engine/argv.py`). One definition, both ends.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from epd_serve.errors import ConfigError
from epd_serve.roles import Role

STORE, DEVICE = "store", "device"
"""Ways of features to who prefills (`StageWiring.feature_transfer`)."""


def worker_endpoint(template: str, rank: int) -> str:
    """ZMQ address of one worker: `ipc:///run/D0.kvw{rank}`, or `tcp://[fd00::4]:8002+{rank}`, where the port is summed.

    The sum stands in the template because TCP ports of ranks are neighbours: one string still names all workers.
    """
    address = template.format(rank=rank)
    if not address.startswith("tcp://") or "+" not in address:
        return address
    head, _, port = address.rpartition(":")
    return f"{head}:{sum(map(int, port.split('+')))}"


def worker_endpoints(template: str, ranks: int) -> tuple[str, ...]:
    """Of all workers, by rank; none where there is no template."""
    return tuple(worker_endpoint(template, rank) for rank in range(ranks)) if template else ()


@dataclass(frozen=True)
class StageWiring:
    """Addresses and policies of one instance.

    Attributes:
        instance, role, incarnation: see `epd_serve.instances.Instance`.
        both: a P or D that has both halves of the KV connector. Which part it takes is a property of each request; its
            role is the one in which it started.
        node: where it is. Shared memory, of KV links and of the arena, joins instances of one node only, whatever
            address they have.
        key_file: of the deployment's key, where its instances may be on several nodes: their addresses are TCP ports
            then (`epd_serve.sockets`), else sockets in the run directory.
        arena: path of the host arena (MM Store tier 1), or "" where no features travel.
        arena_id: names that arena across nodes; features announced from it need no second tier.
        peers: the file that says who else is there (`epd_serve.peers`), or "" for nobody.
        publish: ZMQ address on which this instance announces, or "" where it has nothing to do with features.
        load_publish: ZMQ address on which its scheduler announces `StageReport`, or "" to keep its load to itself.
        mooncake_master: `host:port` of the second tier's master, or "" for the arena alone.
        mooncake_segment_bytes: memory this instance gives to the second tier (encoders).
        feature_queue_bytes: device memory that features may keep on their way into the store, and to others' devices
            (encoders).
        slab: ZMQ address on which its scheduler tells its workers what to copy to their devices ahead of the steps that
            read it (who prefills, where features travel), or "" where they are copied in those steps.
        takes_slab: whether it is given one.
        slab_bytes: device memory that each of its workers takes for that; 0: `activation_peak.feature_slab`.
        feature_transfer: `store`, or `device`: encoders also write features to the slabs of who prefills, by Mooncake's
            Transfer Engine.
        push: ZMQ address on which an encoder is told where to write them, or "" where it writes to the store alone.
        feature_prefetch: `event` (what requests that have arrived will need is fetched when announced) or `demand`
            (fetched when one may run that needs it; for ablation).
        partial_prefill: whether a request may be prefilled up to its first feature that is not here.
        slo_ttft_s, slo_tpot_s: what steps are held to (`epd_serve/budgets.py`); 0: nothing is.
        recompute_limit: how many requests with lost features this instance recomputes at one time.
        kv_endpoint: where this instance's scheduler takes READY (roles that send KV), else "".
        kv_worker_endpoint: template of its workers' data channel for `worker_endpoint` (roles that take KV), else "".
        kv_transport: `auto`, `shm` or `mooncake`.
        mooncake_protocol: `tcp`, `rdma` or `ascend`.
        kv_grouping: how layers are grouped into packets (`epd_serve.engine.kv.grouping_file.open_grouping`).
        kv_packet_floor_bytes: packets smaller than this are not made where a larger one is possible.
        kv_publish: template of the addresses on which the workers announce `KvReport` (roles that send KV), else "".
        kv_faults: what goes wrong on purpose (`epd_serve.kv.faults`), for tests; "" in production.
        traffic: the board on which this instance's fetches and pushes make room for each other (roles that send KV).
        kv_staging: path prefix of the shared-memory staging files this instance makes, one per link.
        kv_staging_bytes: size of each.
        host: numeric address of this node, which Mooncake binds.
        feature_wait_s: how long P waits for a feature event before it recomputes.
        kv_ready_wait_s: how long P keeps a request that no D has reserved for (one that holds blocks meanwhile 10 s).
        kv_peer_timeout_s: silence of the other side after which a transfer fails (heartbeats renew it).
        trace_path: JSON-lines file for phase stamps, or "" for none.
        otlp_traces_endpoint: URL that takes vLLM's own spans (OTLP over HTTP), or "" for none.
    """

    instance: str
    role: Role
    incarnation: str
    both: bool = False
    node: str = "local"
    key_file: str = ""
    arena: str = ""
    arena_id: str = ""
    peers: str = ""
    publish: str = ""
    load_publish: str = ""
    mooncake_master: str = ""
    mooncake_segment_bytes: int = 0
    feature_queue_bytes: int = 256 << 20
    slab: str = ""
    takes_slab: bool = True
    slab_bytes: int = 0
    feature_transfer: str = STORE
    push: str = ""
    feature_prefetch: str = "event"
    partial_prefill: bool = True
    slo_ttft_s: float = 0.0
    slo_tpot_s: float = 0.0
    recompute_limit: int = 2
    kv_endpoint: str = ""
    kv_worker_endpoint: str = ""
    kv_transport: str = "auto"
    mooncake_protocol: str = "tcp"
    kv_grouping: str = "adaptive"
    kv_packet_floor_bytes: int = 1 << 20
    kv_publish: str = ""
    kv_faults: str = ""
    traffic: str = ""
    kv_staging: str = ""
    kv_staging_bytes: int = 64 << 20
    host: str = "127.0.0.1"
    feature_wait_s: float = 2.0
    kv_ready_wait_s: float = 300.0
    kv_peer_timeout_s: float = 10.0
    trace_path: str = ""
    otlp_traces_endpoint: str = ""

    @property
    def sends_kv(self) -> bool:
        """May have to: in its part, or in the other one."""
        return self.role.sends_kv or self.both

    @property
    def takes_kv(self) -> bool:
        return self.role.takes_kv or self.both

    @property
    def prefills(self) -> bool:
        return self.role.prefills or self.both

    @property
    def spans_nodes(self) -> bool:
        """Others may be on other nodes."""
        return bool(self.key_file)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> StageWiring:
        """Parse what `to_json` made. Unknown keys mean a version skew between launcher and stage: refused."""
        unknown = set(raw) - {f.name for f in fields(cls)}
        if unknown:
            raise ConfigError(f"stage wiring has unknown keys {sorted(unknown)}: launcher and stage differ in version")
        return cls(**{**raw, "role": Role(raw["role"])})
