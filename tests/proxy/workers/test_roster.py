"""What a parent's table is told, and what a worker's table makes of it."""

from __future__ import annotations

import pytest
from msgspec import structs

from epd_serve.instances import Instance
from epd_serve.roles import Role
from proxy.registry.table import InstanceTable
from proxy.workers.roster import ParentTable, WorkerRoster


def instance(name: str = "D0", incarnation: str = "one") -> Instance:
    return Instance(name, Role(name.rstrip("0123456789")), "http://h:1", incarnation)


@pytest.fixture
def parent() -> ParentTable:
    return ParentTable()


@pytest.fixture
def worker() -> InstanceTable:
    return InstanceTable()


def state(table: InstanceTable) -> dict[str, tuple[str, bool, str]]:
    return {view.instance.id: (view.instance.incarnation, view.up, view.reason) for view in table.snapshot()}


async def test_a_worker_knows_what_the_parent_knows(parent: ParentTable, worker: InstanceTable) -> None:
    roster = WorkerRoster(worker)
    steps = [
        lambda: parent.apply(instance("P0"), up=False),
        lambda: parent.apply(instance("D0"), up=False),
        lambda: parent.mark_up("P0"),
        lambda: parent.mark_down("P0", "sick"),
        lambda: parent.mark_down("D0", "an old incarnation's", incarnation="zero"),
        lambda: parent.mark_up("P0"),
        lambda: parent.mark_up("D0"),
        lambda: parent.apply(instance("P0", "two"), up=False),
        lambda: parent.remove("D0"),
        lambda: parent.mark_up("P0"),
    ]
    for step in steps:
        step()
        roster.take_in(parent.roster({}))
        assert state(worker) == state(parent)


async def test_a_worker_that_starts_late_ends_with_the_same(parent: ParentTable, worker: InstanceTable) -> None:
    for name in ("E0", "P0", "D0"):
        parent.apply(instance(name), up=False)
        parent.mark_up(name)
    parent.mark_down("E0", "hung")
    WorkerRoster(worker).take_in(parent.roster({}))
    assert state(worker) == state(parent)


async def test_a_worker_that_starts_late_waits_for_no_links_that_are_in_use(worker: InstanceTable) -> None:
    parent = ParentTable(link_grace_s=0.0)
    sender = Instance("P0", Role.P, "http://h:1", "one", kv_news=("ipc:///n",))
    taker = Instance("D0", Role.D, "http://h:2", "one", kv_workers=("ipc:///w",))
    for one in (sender, taker):
        parent.apply(one, up=False)
        parent.mark_up(one.id)
    assert worker_of(parent, up=False) == {"P0": True, "D0": False}, "one end of a link waits for it"
    assert worker_of(parent, up=True) == {"P0": True, "D0": True}


async def test_who_is_up_waits_for_links_to_those_that_come_with_it(worker: InstanceTable) -> None:
    parent = ParentTable()
    taker = Instance("D0", Role.D, "http://h:2", "one", kv_workers=("ipc:///w",))
    for one in (Instance("P0", Role.P, "http://h:1", "one", kv_news=("ipc:///n",)), taker):
        parent.apply(one, up=False)
    parent.mark_up("D0")
    parent.mark_up("P0")
    WorkerRoster(worker).take_in(parent.roster({}))
    assert [view.up for view in parent.snapshot()] == [view.up for view in worker.snapshot()] == [False, True]


def worker_of(parent: ParentTable, *, up: bool) -> dict[str, bool]:
    """Who serves in a worker's table at once, if the parent's instances served or not."""
    table = InstanceTable()
    roster = parent.roster({})
    rows = tuple(structs.replace(row, served=up) for row in roster.rows)
    WorkerRoster(table).take_in(structs.replace(roster, rows=rows))
    return {view.instance.id: view.up for view in table.snapshot()}


async def test_what_is_said_twice_is_passed_on_once(parent: ParentTable) -> None:
    changes = []
    parent.on_change = lambda: changes.append(parent.roster({}))
    parent.apply(instance(), up=False)
    parent.mark_up("D0")
    parent.mark_up("D0")
    parent.mark_down("D0", "gone")
    parent.mark_down("D0", "gone")
    assert [roster.rows[0].healthy for roster in changes] == [False, True, False]
    assert [roster.number for roster in changes] == [1, 2, 3]
    parent.drain("D0")
    parent.drain("D0")
    parent.want((Role.D,))
    parent.want((Role.D,))
    assert parent.number == 5


async def test_who_drains_is_not_forgotten_and_may_come_back(parent: ParentTable, worker: InstanceTable) -> None:
    roster = WorkerRoster(worker)
    for name in ("P0", "D0"):
        parent.apply(instance(name))
    for step in (lambda: parent.drain("D0"), lambda: parent.mark_down("D0", "died"), lambda: parent.mark_up("D0")):
        step()
        roster.take_in(parent.roster({}))
        assert state(worker) == state(parent) and worker.snapshot()[1].draining
    late = InstanceTable()
    WorkerRoster(late).take_in(parent.roster({}))
    assert state(late) == state(parent)
    parent.drain("D0", False)
    roster.take_in(parent.roster({}))
    assert state(worker) == state(parent) and not worker.snapshot()[1].draining


async def test_a_pause_ends_for_workers_when_it_ends_for_the_parent(parent: ParentTable, worker: InstanceTable) -> None:
    roster = WorkerRoster(worker)
    parent.pause_for(100.0)
    roster.take_in(parent.roster({}))
    assert 0 < worker.pause.left_s <= 100.0
    parent.pause_for(0)
    roster.take_in(parent.roster({}))
    assert worker.pause.left_s == 0
