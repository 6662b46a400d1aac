"""What each process of a launch gets of its device's memory, before any of them starts.

Owns the plan, as data and as a table: which instances share which devices, and how these are divided. What is needed
comes from `deploy/memory/sizing.py`, the division from `epd_serve.memory_shares`; refusals are
`deploy/memory/check.py`'s. The estimates have never been held against a card.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.memory.placement_table import table
from deploy.memory.sizing import Sizing
from epd_serve.memory_shares import ENGINE_DEFAULT_SHARE, Division, Grant
from epd_serve.placement import InstancePlan


@dataclass(frozen=True)
class Neighbours:
    """The instances of one set of devices; on CPU, all of the host.

    Attributes:
        division: of each of the devices. shared: bytes beside the instances' own (arena, staging; CPU only).
        node: whose devices they are, where there are several nodes.
    """

    plans: tuple[InstancePlan, ...]
    division: Division
    shared: int = 0
    node: str = ""

    @property
    def names(self) -> str:
        """Of the instances, for people."""
        *others, last = (plan.id for plan in self.plans)
        return f"{', '.join(others)} and {last}" if others else last

    def devices(self, one: InstancePlan) -> str:
        """Of one of the instances, for people."""
        return ":".join(filter(None, (self.node, ",".join(map(str, one.devices)))))


@dataclass(frozen=True)
class MemoryPlan:
    """Of one launch. `kind`: of the devices. `groups`: in layout order."""

    kind: str
    groups: tuple[Neighbours, ...]

    def grants(self) -> dict[str, Grant]:
        return {grant.need.id: grant for group in self.groups for grant in group.division.grants}

    @property
    def shared_devices(self) -> bool:
        return self.kind != "cpu" and any(len(group.plans) > 1 for group in self.groups)


def groups_of(plans: Sequence[InstancePlan], kind: str) -> list[tuple[InstancePlan, ...]]:
    """Instances by the devices that they share; on CPU they all share the host."""
    if kind == "cpu":
        return [tuple(plans)]
    by_devices: dict[tuple[int, ...], list[InstancePlan]] = {}
    for plan in plans:
        by_devices.setdefault(plan.devices, []).append(plan)
    return [tuple(group) for group in by_devices.values()]


def plan_memory(plans: Sequence[InstancePlan], sizing: Sizing) -> MemoryPlan | None:
    """The plan, whether it fits or not; None where the model or a device does not tell its sizes."""
    kind = sizing.inventory.kind
    found = []
    for group in groups_of(plans, kind):
        division = sizing.divided(group)
        if division is None:
            return None
        found.append(Neighbours(group, division, sizing.host_bytes if kind == "cpu" else 0))
    return MemoryPlan(kind, tuple(found))


_GIB = 1 << 30


def gib(size: int) -> str:
    return f"{size / _GIB:.1f} GiB" if abs(size) >= _GIB else f"{size / (1 << 20):.0f} MiB"


def memory_table(plan: MemoryPlan) -> str:
    """Rows of all instances, and a line for each set of devices."""
    header = ("instance", plan.kind, "weights", "activations", "runtime", "KV cache", "tokens", "share")
    rows: list[tuple[str, ...]] = [header]
    for group in plan.groups:
        for one, grant in zip(group.plans, group.division.grants, strict=True):
            need = grant.need
            sizes = (gib(need.weights), gib(need.activations + grant.longest), gib(need.runtime))
            cache = (gib(grant.kv), str(grant.tokens)) if need.kv_token else ("-", "-")
            rows.append((one.id, group.devices(one), *sizes, *cache, _share(grant, plan.kind)))
    return "\n".join((table(rows), *(f"  {_summary(group, plan.kind)}" for group in plan.groups)))


def show_memory(plan: MemoryPlan, folder: Path, say: Callable[[str], None]) -> None:
    """Into `memory.txt` of the run directory; said, too, where instances share a device."""
    text = memory_table(plan)
    (folder / "memory.txt").write_text(text + "\n", encoding="utf-8")
    if plan.shared_devices:
        say(f"memory of the devices:\n{text}")


def memory_json(plan: MemoryPlan) -> list[dict[str, Any]]:
    return [
        {
            "id": one.id,
            "devices": list(one.devices),
            "weights_bytes": grant.need.weights,
            "activation_bytes": grant.need.activations + grant.longest,
            "runtime_bytes": grant.need.runtime,
            "kv_bytes": grant.kv,
            "kv_tokens": grant.tokens,
            "memory_share": grant.share,
        }
        for group in plan.groups
        for one, grant in zip(group.plans, group.division.grants, strict=True)
    ]


def _share(grant: Grant, kind: str) -> str:
    if kind == "cpu":
        return "-"
    if grant.share is not None:
        return f"{grant.share:.4f}".rstrip("0")
    return f"{ENGINE_DEFAULT_SHARE:g} (engine)" if grant.need.kv_token else "-"


def _summary(group: Neighbours, kind: str) -> str:
    division = group.division
    free = f", {gib(division.free)} free now" if division.free < division.total else ""
    if kind == "cpu":
        host = f"host {group.node}".rstrip()
        return f"{host}: {gib(division.taken + group.shared)} of {gib(division.total)}{free}, shared memory included"
    return f"{kind} {group.devices(group.plans[0])}: {gib(division.taken)} of {gib(division.total)}{free}"
