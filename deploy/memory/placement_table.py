"""The placement table: which instance runs where. Text for people, a list for `--json`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from epd_serve.placement import InstancePlan


def table(rows: Sequence[Sequence[str]], indent: str = "  ") -> str:
    """Columns aligned; the first row is the header."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(indent + line for line in lines)


def short_node(node: str) -> str:
    """Its id for people: of one that no person has chosen, the beginning, which of a pod's is its name."""
    if len(node) <= 16:
        return node
    name, dot, _ = node.partition(".")
    return name if dot else node[:8]


def placement_rows(
    plans: Sequence[InstancePlan],
    kind: str = "device",
    devices: Callable[[Sequence[int]], str] = lambda ids: ",".join(map(str, ids)),
) -> list[tuple[str, ...]]:
    """Header and one row per instance: id, stages, devices, neighbours on them, and its part of the cores where any
    instance has only a part. `devices`: tells them to people."""
    shared = any(plan.core_share is not None for plan in plans)
    rows: list[tuple[str, ...]] = [("instance", "stages", kind, "shares it with", *(("cores",) if shared else ()))]
    for plan in plans:
        neighbours = ", ".join(plan.colocated_with) or "-"
        part = ("all" if plan.core_share is None else f"{plan.core_share:.3g}",) if shared else ()
        rows.append((plan.id, plan.role.value, devices(plan.devices), neighbours, *part))
    return rows


def placement_json(plans: Sequence[InstancePlan]) -> list[dict[str, Any]]:
    return [
        {
            "id": plan.id,
            "role": plan.role.value,
            "tp": plan.tp,
            "devices": list(plan.devices),
            "colocated_with": list(plan.colocated_with),
            "memory_share": plan.memory_share,
            "core_share": plan.core_share,
        }
        for plan in plans
    ]
