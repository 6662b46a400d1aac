"""The circuits of many incarnations: which are remembered, what forgives, and whom the table suspends."""

from __future__ import annotations

from epd_serve.instances import Instance
from epd_serve.roles import Role
from proxy.metrics import Metrics
from proxy.registry.table import InstanceTable
from proxy.stages.circuits import CircuitLimits, Circuits, State


def fails(all_of_them: Circuits, instance: Instance) -> None:
    call = all_of_them.call(instance)
    call.failed()
    call.over()


def suspended(table: InstanceTable) -> set[str]:
    return {one.id for one in table.live(Role.PD) if one.suspended}


async def test_circuits_go_with_their_incarnations_and_nobody_stays_suspended() -> None:
    table = InstanceTable()
    instances = [Instance(f"PD{index}", Role.PD, "http://x", "1") for index in range(3)]
    for instance in instances:
        table.apply(instance)
    watched = Circuits(table, Metrics(), CircuitLimits(failures=1, open_s=1000.0, open_max_s=1000.0))
    for instance in instances[:2]:
        fails(watched, instance)
    table.mark_down("PD0", "for a while")
    table.mark_up("PD0")
    table.apply(Instance("PD1", Role.PD, "http://x", "2"))
    assert suspended(table) == {"PD0"}, "the same incarnation has the same circuit"
    fails(watched, instances[2])
    assert suspended(table) == {"PD0", "PD2"} and len(watched._circuits) == 2
    assert watched.state("PD0", "1") is State.OPEN and watched.state("PD1", "1") is State.CLOSED


async def test_a_success_between_failures_forgives_them() -> None:
    table, instance = InstanceTable(), Instance("PD0", Role.PD, "http://x", "1")
    table.apply(instance)
    watched = Circuits(table, Metrics(), CircuitLimits(failures=2, open_s=1000.0))
    fails(watched, instance)
    with watched.call(instance):
        pass
    fails(watched, instance)
    assert watched.state("PD0", "1") is State.CLOSED and not suspended(table)
    fails(watched, instance)
    assert watched.state("PD0", "1") is State.OPEN and suspended(table) == {"PD0"}
    with watched.call(instance):  # as its probe would
        pass
    assert watched.state("PD0", "1") is State.CLOSED and not suspended(table)
