"""Several real processes on one arena, some of which are killed."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from store.arena import Arena
from store.arena.file import H_ROWS_USED
from store.errors import StoreError, StoreFullError
from tests.store.conftest import get_into
from tests.waiting import PATIENCE_S

PAGE = 4096
WAIT_S = PATIENCE_S

# Children attach, say what they did on stdout, and wait on stdin.
PRELUDE = """
import sys, threading
import store.arena.arena
from store.arena import Arena
arena = Arena.attach(sys.argv[1])
def say(*words): print(*words, flush=True)
def wait(*ignored): say("waiting"); sys.stdin.read()
"""
WRITE_HALF = (
    PRELUDE
    + """
def half(target, source):
    target[: len(source) // 2] = source[: len(source) // 2]
    wait()
store.arena.arena.copy_with_checksum = half
arena.put("k", bytes(40 * 4096), shape=(1,), dtype="uint8")
"""
)
FILL_HALF = (
    PRELUDE
    + """
room = arena.reserve("k", 40 * 4096)
if len(sys.argv) > 2:
    room.detach()
room.data[: room.nbytes // 2] = 1
wait()
"""
)
CREATE = """
import sys
from store.arena import Arena
arena = Arena.create(sys.argv[1], 64 * 4096, slots=32, owners=8)
arena.put("k", b"whole", shape=(5,), dtype="uint8")
print("waiting", flush=True)
sys.stdin.read()
"""
HOLD_LEASE = (
    PRELUDE
    + """
lease = arena.lease("k")
wait()
"""
)
HOLD_LOCK = (
    PRELUDE
    + """
from store.arena.table import SlotTable
SlotTable._place = wait
arena.put("other", b"x", shape=(1,), dtype="uint8")
"""
)
RACE = (
    PRELUDE
    + """
sys.stdin.readline()
for number in range(200):
    say(int(arena.put(f"k{number}", b"%d" % number * 1000, shape=(1,), dtype="uint8")))
"""
)
READ_AT = (
    PRELUDE
    + """
slot, offset, nbytes = map(int, sys.stdin.readline().split())
dest = bytearray(nbytes)
arena.copy_pinned("k", slot, offset, dest)
say(dest.decode())
"""
)
CHURN = (
    PRELUDE
    + """
import random
from store.errors import StoreFullError
rng = random.Random(sys.argv[2])
wrong = 0
for _ in range(1500):
    number = rng.randrange(30)
    data = bytes([number]) * (1 + number * 2500)
    if rng.random() < 0.5:
        try:
            arena.put(str(number), data, shape=(1,), dtype="uint8")
        except StoreFullError:
            pass  # the others were interrupted while they held most of it
    else:
        lease = arena.lease(str(number))
        if lease is not None:
            wrong += bytes(lease.view()) != data
            lease.release()
say(wrong)
"""
)

Child = subprocess.Popen[str]
Start = Callable[..., Child]


def put(arena: Arena, key: str, data: bytes = b"x") -> bool:
    return arena.put(key, data, shape=(len(data),), dtype="uint8")


def until_waiting(child: Child) -> None:
    assert child.stdout is not None
    assert child.stdout.readline() == "waiting\n"


def kill(child: Child) -> None:
    child.kill()
    child.wait(timeout=WAIT_S)


def test_what_one_process_puts_another_gets(arena: Arena, arena_path: Path, python: Start) -> None:
    put(arena, "k", b"abc")
    code = PRELUDE + 'lease = arena.lease("k"); say(lease.nbytes, bytes(lease.view()).decode())'
    out, _ = python(code, arena_path).communicate(timeout=WAIT_S)
    assert out == "3 abc\n"


def test_of_concurrent_writers_of_one_key_exactly_one_stores(arena_path: Path, python: Start) -> None:
    arena = Arena.create(arena_path, 200 * 2 * PAGE, slots=256)
    children = [python(RACE, arena_path) for _ in range(3)]
    for child in children:  # a newline starts them as nearly together as it gets
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
    stored = [[int(line) for line in child.communicate(timeout=WAIT_S)[0].split()] for child in children]
    assert [sum(of_key) for of_key in zip(*stored, strict=True)] == [1] * 200
    dest = bytearray(3000)
    for number in range(200):
        meta = get_into(arena, f"k{number}", dest)
        assert meta is not None and dest[: meta.nbytes] == b"%d" % number * 1000
    arena.close()


def test_a_second_writer_does_not_wait_for_a_live_first_one(arena: Arena, arena_path: Path, python: Start) -> None:
    child = python(WRITE_HALF, arena_path)
    until_waiting(child)
    assert not put(arena, "k")
    assert not arena.contains("k")


def test_a_writer_killed_midway_leaves_nothing_readable_and_its_key_free(
    arena: Arena, arena_path: Path, python: Start
) -> None:
    child = python(WRITE_HALF, arena_path)
    until_waiting(child)
    kill(child)
    assert not arena.contains("k") and arena.lease("k") is None
    assert put(arena, "k", b"whole")
    assert arena.stats().used_bytes == PAGE
    assert arena.stats().reclaimed == 1


def test_the_room_of_a_killed_writer_is_taken_back_when_needed(arena: Arena, arena_path: Path, python: Start) -> None:
    child = python(WRITE_HALF, arena_path)
    until_waiting(child)
    with pytest.raises(StoreFullError):
        put(arena, "large", bytes(60 * PAGE))
    kill(child)
    assert put(arena, "large", bytes(60 * PAGE))


@pytest.mark.parametrize("options", [(), ("detached",)])
def test_room_that_a_killed_process_was_filling_is_taken_back(
    arena: Arena, arena_path: Path, python: Start, options: tuple[str, ...]
) -> None:
    child = python(FILL_HALF, arena_path, *options)
    assert child.stdout and child.stdout.readline() == "waiting\n"
    assert not arena.contains("k") and arena.lease("k") is None
    assert arena.put("k", b"x", shape=(1,), dtype="uint8") == bool(options), "its key is free if it was detached"
    kill(child)
    assert arena.contains("k") == bool(options)
    assert arena.put("all", bytes(64 * PAGE), shape=(1,), dtype="uint8"), "no room is lost"
    assert arena.stats().reclaimed == 1


def test_an_arena_outlives_the_process_that_made_it(arena_path: Path, python: Start) -> None:
    child = python(CREATE, arena_path)
    assert child.stdout and child.stdout.readline() == "waiting\n"
    survivor = Arena.attach(arena_path)
    kill(child)
    dest = bytearray(5)
    assert get_into(survivor, "k", dest) is not None and dest == b"whole"
    assert survivor.put("other", bytes(60 * PAGE), shape=(1,), dtype="uint8")
    survivor.close()


def test_a_writer_killed_while_a_zombie_counts_as_dead(arena: Arena, arena_path: Path, python: Start) -> None:
    child = python(WRITE_HALF, arena_path)
    until_waiting(child)
    os.kill(child.pid, 9)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and nobody has collected it
    assert put(arena, "k")


def test_a_living_reader_keeps_its_feature_and_a_killed_one_does_not(
    arena: Arena, arena_path: Path, python: Start
) -> None:
    put(arena, "k", bytes(40 * PAGE))
    child = python(HOLD_LEASE, arena_path)
    until_waiting(child)
    assert arena.stats().leased == 1
    with pytest.raises(StoreFullError):
        put(arena, "large", bytes(60 * PAGE))
    assert arena.contains("k")
    kill(child)
    assert put(arena, "large", bytes(60 * PAGE))
    assert arena.stats().leased == 0


def test_a_process_killed_inside_the_critical_section_blocks_nobody(
    arena: Arena, arena_path: Path, python: Start
) -> None:
    put(arena, "k", b"abc")
    child = python(HOLD_LOCK, arena_path)
    until_waiting(child)
    kill(child)
    assert arena.contains("k") and not arena.contains("other")
    assert put(arena, "other", bytes(60 * PAGE))


def test_one_process_pins_and_another_reads_by_offset(arena: Arena, arena_path: Path, python: Start) -> None:
    put(arena, "k", b"feature")
    with arena.lease("k") as lease:  # type: ignore[union-attr]
        out, _ = python(READ_AT, arena_path).communicate(
            f"{lease.slot} {lease.offset} {lease.nbytes}\n", timeout=WAIT_S
        )
    assert out == "feature\n"


def test_processes_that_churn_a_small_arena_never_read_wrong_bytes(
    arena: Arena, arena_path: Path, python: Start
) -> None:
    children = [python(CHURN, arena_path, seed) for seed in range(3)]
    assert [child.communicate(timeout=WAIT_S)[0] for child in children] == ["0\n"] * 3
    stats = arena.stats()
    assert stats.leased == 0 and stats.corrupt == 0 and stats.evictions > 0


def test_owner_rows_of_dead_processes_are_used_again(arena: Arena, arena_path: Path, python: Start) -> None:
    put(arena, "k")  # takes the first of 8 rows
    table = arena._table
    table.header[H_ROWS_USED] = 8
    for row in range(1, 8):
        table.pin(0, row)  # and nobody has it locked
    assert arena.stats().leased == 1
    child = python(HOLD_LEASE, arena_path)
    until_waiting(child)
    assert arena.stats().reclaimed == 1, "of the row that the child has now"
    assert [row for row in range(8) if table.leases[row * 32]] == list(range(1, 8))


def test_one_process_too_many_is_refused(arena: Arena, arena_path: Path) -> None:
    others = [Arena.attach(arena_path) for _ in range(8)]
    for number, other in enumerate(others):
        put(other, f"k{number}")
    with pytest.raises(StoreError, match="too many processes"):
        put(arena, "k")
    others[0].close()
    assert put(arena, "k")
    for other in others:
        other.close()


def _in_forked_child(arena: Arena, results: multiprocessing.SimpleQueue[object]) -> None:
    results.put(arena.contains("k"))
    results.put(put(arena, "from the child"))
    lease = arena.lease("k")
    results.put(lease is not None and bytes(lease.view()))
    os._exit(0)  # without a release: the child's lease dies with it


@pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")
def test_a_forked_child_has_its_own_lock_and_leases(arena: Arena) -> None:
    put(arena, "k", b"abc")
    held = arena.lease("k")
    assert held is not None
    context = multiprocessing.get_context("fork")
    results: multiprocessing.SimpleQueue[object] = context.SimpleQueue()
    child = context.Process(target=_in_forked_child, args=(arena, results))
    child.start()
    assert [results.get() for _ in range(3)] == [True, True, b"abc"]
    child.join(timeout=WAIT_S)
    assert not child.is_alive()
    assert arena.contains("from the child")
    held.release()
    with pytest.raises(StoreFullError, match="bytes in an arena"):
        put(arena, "too large", bytes(65 * PAGE))
    assert put(arena, "large", bytes(64 * PAGE))  # the dead child's lease is no obstacle
    assert arena.stats().leased == 0
