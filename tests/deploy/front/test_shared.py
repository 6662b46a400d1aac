"""Slots of the shared counters: the same for every life of whoever gives them, and nobody's twice."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.front.shared import Slots
from deploy.host.state import SharedState, StateFiles
from epd_serve.errors import ConfigError
from epd_serve.instances import IncarnationId
from proxy.registry.instance_state import Work
from proxy.workers.shared_counters import COUNTS, SharedCounters, SharedLedger, settle

FEW = 4


class Giver:
    """Gives slots, and may be killed; workers count beside it."""

    def __init__(self, files: StateFiles, slots: int = FEW) -> None:
        self._files = files
        self._many = slots
        size_bytes = SharedCounters.size_bytes(2, COUNTS, slots=slots)
        self.counters = SharedCounters(memoryview(bytearray(size_bytes)), 2, COUNTS, slots=slots)
        self.follow()

    def follow(self) -> None:
        """Another one goes on, and knows nothing but what is written down."""
        self.ledger = SharedLedger(self.counters, None)
        self.slots = Slots(SharedState(self._files), self.ledger, self._many)

    def worker(self, row: int, *lives: IncarnationId) -> SharedLedger:
        """One that has been told of these."""
        one = SharedLedger(self.counters, row)
        for life in lives:
            one.place(life, self.slots(life))
        return one


@pytest.fixture
def files() -> Iterator[StateFiles]:
    made = StateFiles.make()
    yield made
    for descriptor in (*made.halves, made.count):
        os.close(descriptor)


def lives(name: str, count: int) -> list[IncarnationId]:
    return [(name, str(number)) for number in range(count)]


def test_each_life_has_a_slot_of_its_own_and_keeps_it(files: StateFiles) -> None:
    giver = Giver(files)
    first = [giver.slots(life) for life in lives("P0", FEW)]
    assert sorted(first) == [*range(FEW)] and [giver.slots(life) for life in lives("P0", FEW)] == first


def test_they_are_the_same_after_whoever_gives_them_was_killed_and_what_is_held_is_known(files: StateFiles) -> None:
    giver, (past, present) = Giver(files), lives("P0", 2)
    before = [giver.slots(past)]
    worker = giver.worker(0, past)
    worker.acquire(past, Work.DECODE, 5)
    before.append(giver.slots(present))
    for _ in range(2):
        giver.follow()
        assert giver.ledger.total(past).held == 1, "of a life that has ended, too"
        assert [giver.slots(past), giver.slots(present)] == before


def test_more_lives_than_slots_take_only_those_of_past_lives_that_hold_nothing(files: StateFiles) -> None:
    giver, (held, free, *later) = Giver(files), lives("P0", 40)
    other = ("D0", "a")
    kept = {life: giver.slots(life) for life in (held, other)}
    worker = giver.worker(0, held, other)
    worker.acquire(held, Work.DECODE, 5)
    giver.slots(free)
    for number, life in enumerate(later):
        if number % 7 == 0:
            giver.follow()
        assert giver.slots(life) not in kept.values(), "one is held, the other one is of an instance that is there"
        assert giver.ledger.total(life).held == 0
        beside = giver.worker(1, life)
        beside.acquire(life, Work.PREFILL, 3)
        assert (giver.ledger.total(life).held, giver.ledger.total(held).held) == (1, 1)
        beside.release(life, Work.PREFILL, 3)
    assert giver.slots(other) == kept[other]
    worker.release(held, Work.DECODE, 5)
    taken = {giver.slots(("P0", f"late {number}")) for number in range(3 * FEW)}
    assert kept[held] in taken and kept[other] not in taken


def test_what_a_worker_held_that_was_killed_gives_its_slot_back(files: StateFiles) -> None:
    giver, (first, *later) = Giver(files, 2), lives("P0", 4)
    giver.worker(0, first).acquire(first, Work.DECODE, 5)
    giver.worker(1, later[0]).acquire(later[0], Work.DECODE, 5)
    with pytest.raises(ConfigError, match="no room"):
        giver.slots(later[1])
    settle(giver.counters, 0)
    assert giver.slots(later[1]) == 0


steps = st.lists(
    st.tuples(
        st.sampled_from(["life", "acquire", "release", "kill worker", "kill giver"]),
        st.sampled_from(["P0", "D0"]),
        st.integers(0, 1),
    ),
    max_size=80,
)


@settings(deadline=None, max_examples=60)
@given(steps=steps)
def test_whoever_is_killed_no_life_is_ever_counted_with_another(steps: list[tuple[str, str, int]]) -> None:
    files = StateFiles.make()
    giver = Giver(files)
    present = {name: (name, "0") for name in ("P0", "D0")}
    workers = [giver.worker(row, *present.values()) for row in range(2)]
    held: list[list[IncarnationId]] = [[], []]
    for number, (what, name, row) in enumerate(steps, 1):
        match what:
            case "life":
                holding = {life for some in held for life in some}
                if len(holding | set(present.values())) >= FEW:
                    continue  # there is no room for another one
                life = present[name] = (name, str(number))
                slot = giver.slots(life)
                for worker in workers:
                    worker.place(life, slot)
            case "acquire":
                workers[row].acquire(present[name], Work.DECODE, 1)
                held[row].append(present[name])
            case "release" if held[row]:
                workers[row].release(held[row].pop(0), Work.DECODE, 1)
            case "kill worker":
                settle(giver.counters, row)
                held[row], workers[row] = [], giver.worker(row, *present.values())
            case "kill giver":
                giver.follow()
        for life in {*present.values(), *held[0], *held[1]}:
            assert giver.ledger.total(life).held == held[0].count(life) + held[1].count(life)
    for descriptor in (*files.halves, files.count):
        os.close(descriptor)
