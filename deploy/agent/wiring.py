"""Connects one instance to the rest of its node: its port, its sockets, the arena. Pure; the one place that does it.

What an instance is, its spec says (`deploy/agent/specs.py`); here it gets a name and addresses, for one life.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from deploy.host.rundir import RunDir
from deploy.runtime.protocol import Order
from epd_serve.answer_flags import answer_flags
from epd_serve.instances import Instance
from epd_serve.stage_plan import StagePlan
from epd_serve.wiring import StageWiring, worker_endpoints
from npu_ops.core_grants import CoreOrder

STAGE_HOST = "127.0.0.1"
"""Stages bind loopback: the proxy is their only client."""


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


def wire(order: Order, site: Site, port: int, incarnation: str) -> StagePlan:
    """What the command of one life is made from. `port`: of its HTTP server, the same in every life."""
    stage, run = _stage(order), site.run
    return replace(
        stage,
        instance=order.id,
        role=order.spec.role,
        port=port,
        wiring=_wiring(order, site, incarnation),
        core_order=_named(stage.core_order, order.id, run.grant_template(order.id)),
        memory_names=run.memory_names(order.id),
    )


def instance_of(stage: StagePlan) -> Instance:
    """What a proxy is told about a life."""
    wiring = stage.wiring
    return Instance(
        id=stage.instance,
        role=stage.role,
        url=f"http://{stage.host}:{stage.port}",
        incarnation=wiring.incarnation,
        kv_endpoint=wiring.kv_endpoint or None,
        events=wiring.publish or None,
        devices=stage.device_ids,
        kv_news=worker_endpoints(wiring.kv_publish, stage.tp),
        kv_workers=worker_endpoints(wiring.kv_worker_endpoint, stage.tp),
        load_news=wiring.load_publish,
        core_share=stage.core_order.share if stage.core_order is not None else None,
        cpu_cores=stage.cores,
        answer_flags=answer_flags(stage.extra_args) if stage.first_token else None,
    )


def _stage(order: Order) -> StagePlan:
    assert order.spec.stage is not None, "specs() says what its stage is"
    return order.spec.stage


def _wiring(order: Order, site: Site, incarnation: str) -> StageWiring:
    """Addresses of one life. Features concern encoders and every instance that takes them."""
    spec, run, name = order.spec, site.run, order.id
    policies, featured = _stage(order).wiring, spec.featured
    pooled = featured and bool(site.mooncake_master)
    feature_path = policies.feature_path if pooled else "host"
    sends_kv = bool(_kv_endpoint(order, run))
    return replace(
        policies,
        instance=name,
        role=spec.role,
        incarnation=incarnation,
        arena=str(run.arena) if featured else "",
        arena_id=run.launch_id if featured else "",
        peers=str(run.peers),
        publish=_announces(order, run),
        load_publish=run.ipc(f"{name}.load"),
        mooncake_master=site.mooncake_master if featured else "",
        mooncake_segment_bytes=policies.mooncake_segment_bytes if pooled else 0,
        feature_path=feature_path,
        feature_worker_endpoint=run.ipc(f"{name}.features{{rank}}")
        if feature_path == "device" and spec.role.takes_features
        else "",
        kv_endpoint=_kv_endpoint(order, run),
        kv_worker_endpoint=_kv_workers(order, run),
        kv_publish=run.ipc(f"{name}.kvnews{{rank}}") if sends_kv else "",
        traffic=str(run.socket(f"{name}.traffic")) if sends_kv else "",
        kv_staging=str(run.shm / f"epd-{run.launch_id}-kv") if sends_kv else "",
        kv_staging_bytes=site.staging_bytes,
        trace_path=f"{policies.trace_path}/{name}.jsonl" if policies.trace_path else "",
    )


def _announces(order: Order, run: RunDir) -> str:
    return run.ipc(f"{order.id}.events") if order.spec.featured else ""


def _kv_endpoint(order: Order, run: RunDir) -> str:
    return run.ipc(f"{order.id}.kv") if order.spec.role.sends_kv or order.spec.both else ""


def _kv_workers(order: Order, run: RunDir) -> str:
    return run.ipc(f"{order.id}.kvw{{rank}}") if order.spec.role.takes_kv or order.spec.both else ""


def _named(order: CoreOrder | None, name: str, report: str) -> CoreOrder | None:
    """It knows itself by the name that it has in its layout."""
    if order is None:
        return None
    shares = {name if one == order.instance else one: share for one, share in order.shares.items()}
    return replace(order, instance=name, shares=shares, report=report)
