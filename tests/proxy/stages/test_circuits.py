"""The circuits of many incarnations: how many are remembered, and what happens to those that are forgotten."""

from __future__ import annotations

import pytest

from epd_serve.instances import Instance
from epd_serve.roles import Role
from proxy.metrics import Metrics
from proxy.registry.table import InstanceTable
from proxy.stages import circuits
from proxy.stages.circuit import CircuitLimits, State
from proxy.stages.circuits import Circuits


def fails(all_of_them: Circuits, instance: Instance) -> None:
    call = all_of_them.call(instance)
    call.failed()
    call.over()


def suspended(table: InstanceTable) -> set[str]:
    return {one.id for one in table.live(Role.PD) if one.suspended}


async def test_who_is_forgotten_is_not_suspended_for_ever_and_it_is_who_failed_longest_ago(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(circuits, "MAX_CIRCUITS", 2)
    table = InstanceTable()
    one, two, three = (Instance(f"PD{index}", Role.PD, "http://x", "incarnation") for index in range(3))
    for instance in (one, two, three):
        table.apply(instance)
    watched = Circuits(table, Metrics(), CircuitLimits(failures=1, open_s=1000.0, open_max_s=1000.0))
    for instance in (one, two, one):
        fails(watched, instance)
    assert suspended(table) == {"PD0", "PD1"}
    fails(watched, three)
    assert suspended(table) == {"PD0", "PD2"}, "PD0 failed after PD1"
    assert watched.state("PD1", "incarnation") is State.CLOSED
    assert watched.state("PD0", "incarnation") is State.OPEN
