"""Connects one instance to the rest of its deployment: its ports, its sockets, the arena. Pure.

What an instance is, its spec says (`deploy/agent/specs.py`); here it gets a name and addresses, for one life. Where all
instances are on one node all of them are sockets in its run directory, which no other user can enter; else in a block
of neighbouring TCP ports for each:

    first       its HTTP server
    + 1, 2, 3   takes READY, or where to write features; announces about features; reports its load
    + 4 …       its workers take KV, then they report their KV links; a port for each rank
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from deploy.host.rundir import RunDir
from deploy.runtime.protocol import Order
from epd_serve.answer_flags import answer_flags
from epd_serve.instances import Instance
from epd_serve.stage_plan import StagePlan
from epd_serve.wiring import DEVICE, StageWiring, worker_endpoints
from npu_ops.core_grants import CoreOrder
from store.addresses import authority

STAGE_HOST = "127.0.0.1"
"""What libraries in stages bind where all are on one node."""

_KV, _EVENTS, _LOAD, _FIRST_WORKER = 1, 2, 3, 4


@dataclass(frozen=True)
class Net:
    """Where a node is, for instances of others.

    Attributes:
        node: its id.
        host: numeric address that its stages bind.
        key_file: of the deployment's key, on this machine; "" where there is no other node.
        ports: from which its instances have theirs; an empty one: any.
    """

    node: str = "local"
    host: str = STAGE_HOST
    key_file: str = ""
    ports: range = range(0)


@dataclass(frozen=True)
class Site:
    """What all instances of a node have in common.

    Attributes:
        staging_bytes: shared memory of each KV link.
        mooncake_master: `host:port` of the second tier's master, "" for the arena alone.
    """

    run: RunDir
    staging_bytes: int
    mooncake_master: str = ""
    net: Net = Net()

    def ports_of(self, order: Order) -> int:
        """How many neighbouring ports an instance needs; none where others are in the run directory."""
        return _FIRST_WORKER + 2 * _stage(order).tp if self.net.key_file else 0


def wire(order: Order, site: Site, port: int, incarnation: str) -> StagePlan:
    """What the command of one life is made from. `port`: the first of its ports, by default the same in every life."""
    stage, run = _stage(order), site.run
    return replace(
        stage,
        instance=order.id,
        role=order.spec.role,
        host=site.net.host,
        port=port,
        uds="" if site.net.key_file else str(run.socket(f"{order.id}.http")),
        wiring=_wiring(order, site, port, incarnation),
        core_order=_named(stage.core_order, order.id, run.grant_template(order.id)),
        memory_names=run.memory_names(order.id),
    )


def instance_of(stage: StagePlan) -> Instance:
    """What a proxy is told about a life."""
    wiring = stage.wiring
    return Instance(
        id=stage.instance,
        role=stage.role,
        url=stage.url,
        incarnation=wiring.incarnation,
        kv_endpoint=wiring.kv_endpoint or None,
        events=wiring.publish or None,
        devices=stage.device_ids,
        kv_news=worker_endpoints(wiring.kv_publish, stage.tp),
        kv_workers=worker_endpoints(wiring.kv_worker_endpoint, stage.tp),
        load_news=wiring.load_publish,
        core_share=stage.core_order.share if stage.core_order is not None else None,
        cpu_cores=stage.cores,
        answer_flags=answer_flags(stage.extra_args),
        node=wiring.node,
    )


def _stage(order: Order) -> StagePlan:
    assert order.spec.stage is not None, "specs() says what its stage is"
    return order.spec.stage


def _wiring(order: Order, site: Site, port: int, incarnation: str) -> StageWiring:
    """Addresses of one life. Features concern encoders and every instance that takes them."""
    spec, run, net, name = order.spec, site.run, site.net, order.id
    policies, featured, tp = _stage(order).wiring, spec.featured, _stage(order).tp
    pooled = featured and bool(site.mooncake_master)
    sends_kv = spec.role.sends_kv or spec.both
    takes_kv = spec.role.takes_kv or spec.both
    prefills = spec.role.prefills or spec.both

    def address(suffix: str, offset: int) -> str:
        return f"tcp://{authority(net.host, port + offset)}" if net.key_file else run.ipc(f"{name}.{suffix}")

    def addresses(suffix: str, offset: int) -> str:
        """Of all workers: a template."""
        return f"{address(suffix, offset)}+{{rank}}" if net.key_file else run.ipc(f"{name}.{suffix}{{rank}}")

    return replace(
        policies,
        instance=name,
        role=spec.role,
        incarnation=incarnation,
        node=net.node,
        key_file=net.key_file,
        host=net.host,
        arena=str(run.arena) if featured else "",
        arena_id=run.launch_id if featured else "",
        peers=str(run.peers),
        publish=address("events", _EVENTS) if featured else "",
        load_publish=address("load", _LOAD),
        push=address("push", _KV)
        if featured and spec.role.sends_features and policies.feature_transfer == DEVICE
        else "",
        slab=run.ipc(f"{name}.slab") if featured and policies.takes_slab and prefills else "",
        mooncake_master=site.mooncake_master if featured else "",
        mooncake_segment_bytes=policies.mooncake_segment_bytes if pooled else 0,
        kv_endpoint=address("kv", _KV) if sends_kv else "",
        kv_worker_endpoint=addresses("kvw", _FIRST_WORKER) if takes_kv else "",
        kv_publish=addresses("kvnews", _FIRST_WORKER + tp) if sends_kv else "",
        traffic=str(run.socket(f"{name}.traffic")) if sends_kv else "",
        kv_staging=str(run.shm / f"epd-{run.launch_id}-kv") if sends_kv else "",
        kv_staging_bytes=site.staging_bytes,
        trace_path=f"{policies.trace_path}/{name}.jsonl" if policies.trace_path else "",
    )


def _named(order: CoreOrder | None, name: str, report: str) -> CoreOrder | None:
    """It knows itself by the name that it has in its layout."""
    if order is None:
        return None
    shares = {name if one == order.instance else one: share for one, share in order.shares.items()}
    return replace(order, instance=name, shares=shares, report=report)
