"""What a deployment is, for programs: what is wanted, what there is, and what is being done about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from deploy.control.doors import Doors
from deploy.control.progress import change_json
from deploy.control.reconciler import Reconciler
from deploy.front.occupancy import under_way
from deploy.runtime.leases import Place
from deploy.runtime.protocol import Node, Observed, Phase


def status_json(reconciler: Reconciler, doors: Doors, leased: Sequence[Place] | None) -> dict[str, Any]:
    """`leased`: None where nothing is lent."""
    changes = reconciler.changes
    waits = reconciler.wanted.waits
    trouble = "; ".join(filter(None, (reconciler.trouble.reason, f"waits for {waits}" if waits else "")))
    return {
        "layout": reconciler.wanted.layout,
        "state": _state(reconciler, trouble),
        "trouble": trouble,
        "paused_s": round(reconciler.paused_s, 3),
        "change": change_json(changes.present) if changes.present is not None else None,
        "nodes": [_node_json(node, leased) for node in reconciler.overlay.nodes],
        "instances": [_instance_json(one, doors) for one in reconciler.instances],
        "layouts": list(reconciler.layouts),
        "past": [change_json(one) for one in changes.past],
    }


def _state(reconciler: Reconciler, trouble: str) -> str:
    if trouble or any(one.phase is Phase.DOWN for one in reconciler.instances):
        return "degraded"
    if reconciler.paused_s:
        return "paused"
    return "changing" if reconciler.changes.present is not None else "steady"


def _node_json(node: Node, leased: Iterable[Place] | None) -> dict[str, Any]:
    ours = node.devices
    if leased is not None:
        ours = tuple(sorted(device for one in leased if one.node == node.id for device in one.devices))
    return {"id": node.id, "kind": node.kind, "devices": list(node.devices), "ours": list(ours)}


def _instance_json(one: Observed, doors: Doors) -> dict[str, Any]:
    spec = one.order.spec
    return {
        "id": one.order.id,
        "role": spec.role.value,
        "both": spec.both,
        "node": spec.node,
        "devices": list(spec.devices),
        "phase": one.phase.value,
        "reason": one.reason,
        "incarnation": one.instance.incarnation if one.instance is not None else "",
        "pid": one.pid,
        "restarts": one.restarts,
        "up_s": round(one.up_s, 1),
        "in_flight": under_way(doors, one.order.id),
    }
