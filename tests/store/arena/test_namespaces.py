"""Containers that share /dev/shm and not their pids: the kernel's locks tell who is dead, no pid does."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from store.arena import Arena
from store.errors import StoreError, StoreFullError
from tests.store.arena.test_processes import (
    FILL_HALF,
    HOLD_LEASE,
    PRELUDE,
    WAIT_S,
    WRITE_HALF,
    Child,
    kill,
    put,
    until_waiting,
)
from tests.store.conftest import CONTAINED

PAGE = 4096
PUT = (
    PRELUDE
    + """
from store.errors import StoreFullError
try:
    say(arena.put(sys.argv[2], bytes(int(sys.argv[3]) * 4096), shape=(1,), dtype="uint8"))
except StoreFullError:
    say("full")
"""
)
Start = Callable[..., Child]


@pytest.fixture
def contained(python: Start) -> Start:
    tried = subprocess.run([*CONTAINED, "true"], capture_output=True, text=True, timeout=WAIT_S, check=False)
    if tried.returncode:
        pytest.skip(f"no PID namespace for this user: {tried.stderr.strip()}")
    return lambda *arguments: python(*arguments, contained=True)


def answer(child: Child) -> str:
    return child.communicate(timeout=WAIT_S)[0].strip()


def test_a_lease_of_one_container_outlives_a_look_for_the_dead_from_another(
    arena: Arena, arena_path: Path, contained: Start
) -> None:
    put(arena, "k", b"feature" + bytes(40 * PAGE - 7))
    holder = contained(HOLD_LEASE, arena_path)
    until_waiting(holder)
    assert answer(contained(PUT, arena_path, "large", 60)) == "full"
    with pytest.raises(StoreFullError):
        put(arena, "large", bytes(60 * PAGE))
    assert arena.contains("k") and arena.stats().leased == 1


def test_what_one_container_is_writing_is_not_taken_by_another(
    arena: Arena, arena_path: Path, contained: Start
) -> None:
    until_waiting(contained(WRITE_HALF, arena_path))
    assert answer(contained(PUT, arena_path, "k", 1)) == "False", "its writer lives"
    assert answer(contained(PUT, arena_path, "large", 60)) == "full"
    assert arena.stats().reclaimed == 0


@pytest.mark.parametrize("code", [HOLD_LEASE, WRITE_HALF, FILL_HALF])
def test_what_a_killed_container_held_is_taken_back_by_another(
    arena: Arena, arena_path: Path, contained: Start, code: str
) -> None:
    if code == HOLD_LEASE:
        put(arena, "k", bytes(40 * PAGE))
    held = contained(code, arena_path)
    until_waiting(held)
    kill(held)
    assert answer(contained(PUT, arena_path, "large", 60)) == "True"
    stats = arena.stats()
    assert (stats.leased, stats.reclaimed) == (0, 1)


def test_a_feature_whose_lease_ended_is_refused_to_a_reader_of_another_process(arena: Arena, arena_path: Path) -> None:
    reader, dest = Arena.attach(arena_path), bytearray(7)
    put(arena, "k", b"feature")
    lease = arena.lease("k")
    assert lease is not None
    reader.copy_pinned("k", lease.slot, lease.offset, dest)
    assert dest == b"feature"
    arena.remove("k")
    reader.copy_pinned("k", lease.slot, lease.offset, dest)  # dropped, and still pinned
    for key, slot, offset in (("other", lease.slot, lease.offset), ("k", 2, lease.offset), ("k", lease.slot, PAGE)):
        with pytest.raises(StoreError, match="nobody leases it"):
            reader.copy_pinned(key, slot, offset, dest)
    lease.release()
    with pytest.raises(StoreError, match="nobody leases it"):
        reader.copy_pinned("k", lease.slot, lease.offset, dest)
    reader.close()


def test_a_feature_that_loses_its_lease_while_it_is_read_is_refused(
    arena: Arena, arena_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Arena.attach(arena_path)
    put(arena, "k", b"feature")
    lease = arena.lease("k")
    assert lease is not None
    monkeypatch.setattr("store.arena.arena.copy", lambda target, source: lease.release())
    with pytest.raises(StoreError, match="nobody leases it"):
        reader.copy_pinned("k", lease.slot, lease.offset, bytearray(7))
    monkeypatch.undo()
    reader.close()


def test_an_arena_closed_while_it_is_written_keeps_the_room(arena: Arena, arena_path: Path) -> None:
    writer = Arena.attach(arena_path)
    room = writer.reserve("k", 40 * PAGE)
    assert room is not None
    writer.close()  # a thread or a transfer may still write there
    with pytest.raises(StoreFullError):
        put(arena, "large", bytes(60 * PAGE))


def test_a_kernel_without_such_locks_is_refused_in_one_line(
    arena: Arena, arena_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_such_command(fd: int, command: int, argument: bytes) -> bytes:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr("store.arena.file.fcntl.fcntl", no_such_command)
    with pytest.raises(StoreError, match="no locks of open file descriptions"):
        Arena.attach(arena_path)
    monkeypatch.undo()
