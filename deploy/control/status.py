"""A deployment and its changes as JSON."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from deploy.control.actuator import Doors
from deploy.control.changes import Change
from deploy.control.reconciler import Reconciler
from deploy.front.occupancy import under_way
from deploy.runtime.leases import Place
from deploy.runtime.protocol import Node, Observed, Phase

Json = dict[str, Any]


def status_json(reconciler: Reconciler, doors: Doors, leased: Sequence[Place] | None) -> Json:
    """What is wanted, what there is, and what is being done about it. `leased`: None where nothing is lent."""
    changes = reconciler.changes
    waits = reconciler.wanted.waits
    trouble = "; ".join(filter(None, (reconciler.trouble, f"waits for {waits}" if waits else "")))
    state = "changing" if changes.present is not None else "steady"
    if reconciler.paused_s:
        state = "paused"
    if trouble or any(one.phase is Phase.DOWN for one in reconciler.instances):
        state = "degraded"
    return {
        "layout": reconciler.wanted.layout,
        "state": state,
        "trouble": trouble,
        "paused_s": round(reconciler.paused_s, 3),
        "change": change_json(changes.present),
        "nodes": [_node_json(node, leased) for node in reconciler.nodes],
        "instances": [_instance_json(one, doors) for one in reconciler.instances],
        "layouts": list(reconciler.layouts),
        "past": [change_json(one) for one in changes.past],
    }


def _node_json(node: Node, leased: Iterable[Place] | None) -> Json:
    ours = list(node.devices)
    if leased is not None:
        ours = sorted(device for one in leased if one.node == node.id for device in one.devices)
    return {"id": node.id, "kind": node.kind, "devices": list(node.devices), "ours": ours}


def _instance_json(one: Observed, doors: Doors) -> Json:
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
        "in_flight": under_way(doors.table, one.order.id),
    }


def change_json(change: Change | None) -> Json | None:
    """All of it."""
    if change is None:
        return None
    seconds = change.seconds if change.seconds is not None else time.monotonic() - change.began
    return {
        "number": change.number,
        "what": change.what,
        "from": change.before,
        "to": change.layout,
        "state": change.state.value,
        "over": change.state.over,
        "reason": change.reason,
        "seconds": round(seconds, 3),
        "paused_s": round(change.paused_s, 3),
        "cut_requests": change.cut,
        "steps": [
            {
                **step.action,
                "began_s": round(step.began - change.began, 3),
                "seconds": round(step.seconds, 3) if step.seconds is not None else None,
                "note": step.note,
            }
            for step in change.steps
        ],
    }
