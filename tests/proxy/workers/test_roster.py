"""What a parent publishes, and what its own table and a worker's make of it."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from msgspec import structs

from epd_serve.instances import IncarnationId, Instance
from epd_serve.roles import Role
from proxy.registry.table import InstanceTable
from proxy.workers.roster import Publisher, WorkerRoster
from proxy.workers.wire import Row

SENDER = Instance("P0", Role.P, "http://h:1", "one", kv_news=("ipc:///n",))
TAKER = Instance("D0", Role.D, "http://h:2", "one", kv_workers=("ipc:///w",))
LATER = Instance("P1", Role.P, "http://h:3", "one", kv_news=("ipc:///m",))


def row(name: str = "D0", trouble: str = "", incarnation: str = "one") -> Row:
    return Row(Instance(name, Role(name.rstrip("0123456789")), "http://h:1", incarnation), not trouble, trouble)


@pytest.fixture
def table() -> InstanceTable:
    """The parent's."""
    return InstanceTable()


@pytest.fixture
def parent(table: InstanceTable) -> Publisher:
    return Publisher(table)


@pytest.fixture
def worker() -> InstanceTable:
    return InstanceTable()


def state(table: InstanceTable) -> dict[str, tuple[str, bool, str]]:
    return {view.instance.id: (view.instance.incarnation, view.up, view.reason) for view in table.snapshot()}


async def test_a_worker_knows_what_the_parent_knows(
    parent: Publisher, table: InstanceTable, worker: InstanceTable
) -> None:
    roster = WorkerRoster(worker)
    steps = [
        ([row("P0", "starting")], {"P0": ("one", False, "starting")}),
        ([row("P0"), row("D0", "starting")], {"P0": ("one", True, ""), "D0": ("one", False, "starting")}),
        ([row("P0", "sick"), row("D0")], {"P0": ("one", False, "sick"), "D0": ("one", True, "")}),
        ([row("P0"), row("D0")], {"P0": ("one", True, ""), "D0": ("one", True, "")}),
        ([row("P0", "new", "two"), row("D0")], {"P0": ("two", False, "new"), "D0": ("one", True, "")}),
        ([row("P0", "", "two")], {"P0": ("two", True, "")}),
        ([row("D0", "", "two")], {"D0": ("two", True, "")}),
        ([], {}),
    ]
    for rows, expected in steps:
        parent.publish(rows, ())
        roster.take_in(parent.roster({}))
        assert state(worker) == state(table) == expected


async def test_a_worker_that_starts_late_ends_with_the_same(
    parent: Publisher, table: InstanceTable, worker: InstanceTable
) -> None:
    parent.publish(map(row, ("E0", "P0", "D0")), ())
    parent.publish([row("E0", "hung"), row("P0"), row("D0")], ())
    WorkerRoster(worker).take_in(parent.roster({}))
    assert state(worker) == state(table) and not worker.is_up("E0") and worker.is_up("P0")


async def test_a_worker_that_starts_late_waits_for_no_links_that_are_in_use() -> None:
    parent = Publisher(InstanceTable(link_grace_s=0.0))
    parent.publish([Row(SENDER, True), Row(TAKER, True)], ())
    assert worker_of(parent, up=False) == {"P0": True, "D0": False}, "one end of a link waits for it"
    assert worker_of(parent, up=True) == {"P0": True, "D0": True}
    assert {one.instance.id: one.served for one in parent.roster({}).rows} == {"P0": True, "D0": True}


async def test_who_is_up_waits_for_links_to_those_that_come_with_it(
    parent: Publisher, table: InstanceTable, worker: InstanceTable
) -> None:
    parent.publish([Row(SENDER, False, "starting"), Row(TAKER, True)], ())
    parent.publish([Row(SENDER, True), Row(TAKER, True)], ())
    WorkerRoster(worker).take_in(parent.roster({}))
    assert up(table) == up(worker) == {"P0": False, "D0": True}


async def test_a_parent_that_goes_on_waits_for_links_of_those_that_come_later(table: InstanceTable) -> None:
    parent = Publisher(table, goes_on=True)
    there = [Row(SENDER, True), Row(TAKER, True)]
    parent.publish(there, ())
    assert up(table) == {"P0": True, "D0": True}, "their links are in use"
    parent.publish([*there, Row(LATER, True)], ())
    assert up(table) == {"P0": True, "D0": True, "P1": False}
    assert {one.instance.id: one.served for one in parent.roster({}).rows} == up(table)


def up(table: InstanceTable) -> dict[str, bool]:
    return {view.instance.id: view.up for view in table.snapshot()}


def worker_of(parent: Publisher, *, up: bool) -> dict[str, bool]:
    """Who serves in a worker's table at once, if the parent's instances served or not."""
    table = InstanceTable()
    roster = parent.roster({})
    rows = tuple(structs.replace(row, served=up) for row in roster.rows)
    WorkerRoster(table).take_in(structs.replace(roster, rows=rows))
    return {view.instance.id: view.up for view in table.snapshot()}


async def test_what_is_said_twice_is_passed_on_once(parent: Publisher) -> None:
    changes = []
    parent.on_change = lambda: changes.append(parent.roster({}))
    for trouble in ("starting", "", "", "gone", "gone"):
        parent.publish([row("D0", trouble)], ())
    assert [roster.rows[0].healthy for roster in changes] == [False, True, False]
    assert [roster.number for roster in changes] == [1, 2, 3]
    parent.drain("D0")
    parent.drain("D0")
    for _ in range(2):
        parent.publish([row("D0", "gone")], (Role.D,))
    assert parent.number == 5


async def test_numbers_go_on_where_another_parent_ended_and_begin_with_what_is_published(table: InstanceTable) -> None:
    parent = Publisher(table, after=41)
    parent.drain("D0")
    parent.pause(100.0)
    assert not parent.number, "of instances nothing is known yet: there is nothing to go by"
    parent.publish([row()], ())
    assert parent.number == 42 and parent.roster({}).rows[0].draining and parent.roster({}).paused_s > 0


async def test_who_drains_is_not_forgotten_and_may_come_back(
    parent: Publisher, table: InstanceTable, worker: InstanceTable
) -> None:
    roster = WorkerRoster(worker)
    parent.publish([row("P0"), row("D0")], ())
    parent.drain("D0")
    for trouble in ("", "died", ""):
        parent.publish([row("P0"), row("D0", trouble)], ())
        roster.take_in(parent.roster({}))
        assert state(worker) == state(table) and worker.snapshot()[1].draining
    late = InstanceTable()
    WorkerRoster(late).take_in(parent.roster({}))
    assert state(late) == state(table) and late.snapshot()[1].draining
    parent.drain("D0", False)
    roster.take_in(parent.roster({}))
    assert state(worker) == state(table) and not worker.snapshot()[1].draining


async def test_who_has_gone_and_comes_again_does_not_drain_any_more(parent: Publisher, table: InstanceTable) -> None:
    parent.publish([row("P0"), row("D0")], ())
    parent.drain("D0")
    parent.publish([row("P0")], ())
    assert not parent.leaving
    parent.publish([row("P0"), row("D0", "", "two")], ())
    assert not table.snapshot()[1].draining


async def test_a_pause_ends_for_workers_when_it_ends_for_the_parent(parent: Publisher, worker: InstanceTable) -> None:
    roster = WorkerRoster(worker)
    parent.publish([row()], ())
    parent.pause(100.0)
    roster.take_in(parent.roster({}))
    assert 0 < worker.pause.left_s <= 100.0
    parent.pause(0)
    roster.take_in(parent.roster({}))
    assert worker.pause.left_s == 0


async def test_each_life_comes_with_the_slot_it_is_counted_in(table: InstanceTable) -> None:
    given: list[IncarnationId] = []

    def slot_of(incarnation_id: IncarnationId) -> int:
        if incarnation_id not in given:
            given.append(incarnation_id)
        return given.index(incarnation_id)

    parent = Publisher(table, slot_of)

    def slots(rows: Iterable[Row]) -> list[int]:
        parent.publish(rows, ())
        return [one.slot for one in parent.roster({}).rows]

    assert slots([row("P0"), row("D0")]) == [0, 1]
    assert slots([row("P0", "", "two"), row("D0", "sick")]) == [2, 1]
    assert slots([row("D0")]) == [1]
