"""Counts that several processes share: what they add up to, and what a writer leaves that is killed."""

from __future__ import annotations

import mmap
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epd_serve.errors import ConfigError
from proxy.registry.instance_state import NO_TALLY, NOTHING, Ledger, Work
from proxy.workers.shared_counters import COUNTS, Asked, Cell, SharedCounters, SharedLedger, settle, shared_memory
from tests.waiting import wait_for

REPOSITORY = Path(__file__).parents[3]
INCARNATIONS = [("P0", "a"), ("P0", "b"), ("D0", "a")]
SLOTS = 4


def counters(rows: int, slots: int = SLOTS) -> SharedCounters:
    return SharedCounters(
        memoryview(bytearray(SharedCounters.size_bytes(rows, COUNTS, slots=slots))), rows, COUNTS, slots=slots
    )


def test_a_buffer_of_another_shape_is_refused() -> None:
    buffer = memoryview(bytearray(SharedCounters.size_bytes(3, COUNTS)))
    SharedCounters(buffer, 3, COUNTS)
    with pytest.raises(ConfigError, match="no counters of 2 rows"):
        SharedCounters(buffer, 2, COUNTS)


def ledger(shared: SharedCounters, row: int | None) -> SharedLedger:
    """Of a process that has been told where each life is counted."""
    one = SharedLedger(shared, row)
    for slot, incarnation in enumerate(INCARNATIONS):
        one.place(incarnation, slot)
    return one


def test_what_one_process_acquires_all_see() -> None:
    shared = counters(2)
    one, other = ledger(shared, 0), ledger(shared, 1)
    one.acquire(INCARNATIONS[0], Work.PREFILL, 700)
    other.acquire(INCARNATIONS[0], Work.PREFILL, 300)
    tally = one.tallies(INCARNATIONS[0])[Work.PREFILL]
    assert (tally.held, tally.held_weight) == (2, 1000)
    assert one.tallies(INCARNATIONS[0])[Work.DECODE].held == 0
    assert one.tallies(INCARNATIONS[1])[Work.PREFILL].held == 0
    one.release(INCARNATIONS[0], Work.PREFILL, 700)
    tally = other.tallies(INCARNATIONS[0])[Work.PREFILL]
    assert (tally.held, tally.held_weight, tally.acquired_weight) == (1, 300, 1000)


def test_a_killed_process_holds_nothing_and_its_counts_stay() -> None:
    shared = counters(2)
    killed, reader = ledger(shared, 0), ledger(shared, None)
    killed.acquire(INCARNATIONS[0], Work.DECODE, 1000)
    killed.acquire(INCARNATIONS[1], Work.ENCODE, 50)
    killed.acquire(INCARNATIONS[0], Work.KV, 7000)
    killed.acquire(INCARNATIONS[1], Work.AHEAD, 900)
    assert reader.total(INCARNATIONS[0]).held_weight == 1000, "but for what is counted aside"
    settle(shared, 0)
    for incarnation in INCARNATIONS:
        assert all(tally.held == 0 and tally.held_weight == 0 for tally in reader.tallies(incarnation).values())
    successor = ledger(shared, 0)
    successor.acquire(INCARNATIONS[0], Work.DECODE, 500)
    tally = reader.tallies(INCARNATIONS[0])[Work.DECODE]
    assert (tally.held, tally.held_weight, tally.acquired_weight) == (1, 500, 1500)


@pytest.mark.parametrize("work", list(Work))
@pytest.mark.parametrize("done", range(5))
def test_whatever_of_a_count_was_written_before_the_kill_is_released(done: int, work: Work) -> None:
    """An acquisition is two stores, and so is a release: the process ends after so many of them."""
    shared, writes = counters(1), 0
    killed, reader = ledger(shared, 0), ledger(shared, None)
    add = shared.add

    def counted(store: Callable[..., None]) -> Callable[..., None]:
        def write(*values: int) -> None:
            nonlocal writes
            if writes == done:
                raise KeyboardInterrupt
            writes += 1
            store(*values)

        return write

    shared.add = counted(add)  # type: ignore[method-assign]
    with suppress(KeyboardInterrupt):
        killed.acquire(INCARNATIONS[0], work, 1000)
        killed.release(INCARNATIONS[0], work, 1000)
        killed.acquire(INCARNATIONS[0], work, 1000)
    assert writes == done
    shared.add = add  # type: ignore[method-assign]
    assert reader.tallies(INCARNATIONS[0])[work].held <= 1
    settle(shared, 0)
    settle(shared, 0)  # whoever collected it was killed itself, and its successor does it again
    tally = reader.tallies(INCARNATIONS[0])[work]
    assert (tally.held, tally.held_weight) == (0, 0)
    successor = ledger(shared, 0)
    successor.acquire(INCARNATIONS[0], work, 500)
    tally = reader.tallies(INCARNATIONS[0])[work]
    assert (tally.held, tally.held_weight) == (1, 500)
    successor.release(INCARNATIONS[0], work, 500)
    assert reader.tallies(INCARNATIONS[0])[work].held == 0


def test_a_process_that_ended_goes_by_no_roster_takes_no_connections_and_has_no_requests() -> None:
    shared = counters(2)
    shared.ask(Asked.DRAIN)
    said = {Cell.TAKES: 8, Cell.OBEYED: Asked.DRAIN, Cell.REQUESTS: 5, Cell.ROSTER: 9}
    for cell, value in said.items():
        shared.say(0, cell, value)
    assert shared.least_connections(1) == 7
    settle(shared, 0)
    assert [shared.said(0, cell) for cell in said] == [0, Asked.SERVE, 0, 0]
    assert shared.asked is Asked.DRAIN and shared.least_connections(1) is None


def test_a_life_that_nobody_has_placed_is_not_counted_and_one_that_is_forgotten_neither() -> None:
    shared = counters(1)
    one = SharedLedger(shared, 0)
    assert one.total(INCARNATIONS[0]) == NO_TALLY and one.tallies(INCARNATIONS[0]) == NOTHING
    one.place(INCARNATIONS[0], 3)
    one.acquire(INCARNATIONS[0], Work.DECODE, 1)
    assert one.total(INCARNATIONS[0]).held == 1
    one.forget(INCARNATIONS[0])
    assert one.total(INCARNATIONS[0]) == NO_TALLY


steps = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(INCARNATIONS), st.sampled_from(list(Work)), st.integers(0, 5000)),
    max_size=60,
)


@settings(deadline=None, max_examples=40)
@given(steps=steps, ends=st.lists(st.integers(0, 200), max_size=60), kills=st.lists(st.integers(0, 59), max_size=4))
def test_several_processes_count_as_one(
    steps: list[tuple[int, tuple[str, str], Work, int]], ends: list[int], kills: list[int]
) -> None:
    """Three that share counters against one that counts everything, with processes killed on the way."""
    shared = counters(3)
    processes, alone = [ledger(shared, row) for row in range(3)], Ledger()
    held: list[list[tuple[tuple[str, str], Work, int]]] = [[], [], []]
    for number, (row, incarnation, work, weight) in enumerate(steps):
        processes[row].acquire(incarnation, work, weight)
        alone.acquire(incarnation, work, weight)
        held[row].append((incarnation, work, weight))
        if number < len(ends) and held[row]:
            ended = held[row].pop(ends[number] % len(held[row]))
            processes[row].release(*ended)
            alone.release(*ended)
        if number in kills:
            settle(shared, row)
            for lost in held[row]:
                alone.release(*lost)
            held[row], processes[row] = [], ledger(shared, row)
        for process in processes:
            assert_equal(process, alone)


def assert_equal(one: Ledger, other: Ledger) -> None:
    for incarnation in INCARNATIONS:
        assert dict(one.tallies(incarnation)) == dict(other.tallies(incarnation))
        assert one.total(incarnation) == other.total(incarnation)


WRITER = """
import mmap, random, sys
from proxy.workers.shared_counters import SharedCounters
from proxy.registry.instance_state import Work
from proxy.workers.shared_counters import COUNTS, SharedLedger
fd, row, rows, seed = map(int, sys.argv[1:])
ledger = SharedLedger(SharedCounters(mmap.mmap(fd, 0), rows, COUNTS), row)
draw, held = random.Random(seed), []
for number in range(3):
    ledger.place(("P%d" % number, "a"), number)
print("counting", flush=True)
while True:
    incarnation, work = ("P%d" % draw.randrange(3), "a"), draw.choice(list(Work))
    if len(held) < 20 and draw.random() < 0.6:
        held.append((incarnation, work, draw.randrange(1, 1000)))
        ledger.acquire(*held[-1])
    elif held:
        ledger.release(*held.pop(draw.randrange(len(held))))
    if draw.random() < 0.01:
        gone = ("gone", str(draw.randrange(99)))
        ledger.place(gone, 3 + draw.randrange(9))
        ledger.acquire(gone, work, 1)
        ledger.release(gone, work, 1)
        ledger.forget(gone)
"""


@pytest.fixture
def memory() -> Iterator[int]:
    fd = shared_memory(SharedCounters.size_bytes(3, COUNTS))
    yield fd
    os.close(fd)


def writer(memory: int, row: int, seed: int) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-c", WRITER, str(memory), str(row), "3", str(seed)]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(argv, pass_fds=[memory], env=env, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"counting\n"
    return process


def test_writers_that_are_killed_anywhere_leave_counts_that_only_grow_and_nothing_held(memory: int) -> None:
    shared = SharedCounters(mmap.mmap(memory, 0), 3, COUNTS)
    reader = SharedLedger(shared, None)
    incarnations = [(f"P{number}", "a") for number in range(3)]
    for slot, incarnation in enumerate(incarnations):
        reader.place(incarnation, slot)
    processes = [writer(memory, row, seed=row) for row in range(3)]
    draw, before = random.Random(0), dict.fromkeys((incarnation, work) for incarnation in incarnations for work in Work)
    try:
        wait_for(
            lambda: all(reader.tallies(incarnation)[work].acquired for incarnation in incarnations for work in Work)
        )
        for kill in range(3):
            until = time.monotonic() + draw.random() * 0.05
            looks = 0
            while time.monotonic() < until or looks < 20:
                looks += 1
                for incarnation, work in before:
                    tally, former = reader.tallies(incarnation)[work], before[incarnation, work]
                    assert tally.held >= 0
                    assert former is None or tally.acquired >= former.acquired
                    assert former is None or tally.released >= former.released
                    before[incarnation, work] = tally
            processes[kill].kill()
            processes[kill].wait()
            settle(shared, kill)
        for incarnation in incarnations:
            for tally in reader.tallies(incarnation).values():
                assert (tally.held, tally.held_weight) == (0, 0)
                assert tally.acquired > 0
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.communicate()
