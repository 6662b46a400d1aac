"""What each process of a launch gets of its device's memory, before any of them starts.

Owns the plan as data: which instances share which devices, and how these are divided. What is needed comes from
`deploy/memory/sizing.py`, the division from `epd_serve.memory_shares`; refusals are `deploy/memory/check.py`'s, the
table `deploy/memory/table.py`'s. The estimates have never been held against a card.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deploy.memory.sizing import Sizing
from epd_serve.memory_shares import Division, Grant
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
