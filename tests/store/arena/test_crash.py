"""A process may die between any two changes of the index; the next one finds a whole arena."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import xxhash

from store.arena import Arena, table
from store.feature import FeatureMeta
from store.keys import tenant_of
from tests.store.conftest import get_into

PAGE = 4096


class Died(BaseException):
    """Stands for SIGKILL."""


def dying_after(lines: int) -> Callable[..., Any]:
    """For `sys.settrace`: the table's code is over after so many of its lines, whoever calls it."""
    left = lines

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename != table.__file__:
            return None
        if event == "line":
            left -= 1
            if left < 0:
                raise Died
        return trace

    return trace


def put(arena: Arena, key: str, data: bytes) -> bool:
    return arena.put(key, data, shape=(len(data),), dtype="uint8")


A, B, C, D = (f"001-{number:064x}" for number in range(1, 5))
NEW = f"002-{5:064x}"  # another tenant's


def content(key: str) -> bytes:
    return key[-1].encode() * (3 * PAGE)


def store_more(arena: Arena) -> None:
    put(arena, NEW, content(NEW) * 2)  # evicts A and B


def drop_leased(arena: Arena) -> None:
    lease = arena.lease(B)
    assert lease is not None
    arena.remove(B)
    lease.release()


def fill_room(arena: Arena) -> None:
    room = arena.reserve(NEW, 6 * PAGE)
    assert room is not None
    room.data[:] = np.frombuffer(content(NEW) * 2, dtype=np.uint8)
    digest = xxhash.xxh3_64_intdigest(room.data.tobytes())
    room.commit(FeatureMeta(NEW, (6, PAGE), "uint8", 6 * PAGE, digest)).release()


def detach_room(arena: Arena) -> None:
    room = arena.reserve(NEW, 6 * PAGE)
    assert room is not None
    room.detach()
    put(arena, NEW, content(NEW))
    room.abandon()


def read_all(arena: Arena) -> None:
    for key in (D, C, B, A):
        get_into(arena, key, bytearray(3 * PAGE))


def die_during(operation: Callable[[Arena], None], path: Path, lines: int) -> bool:
    """Runs `operation` in an arena whose process dies after that many lines of the table's code; False if it lived."""
    doomed = Arena.attach(path)
    with doomed._index():
        doomed._row()
    before = sys.gettrace()
    sys.settrace(dying_after(lines))
    try:
        operation(doomed)
    except Died:
        sys.settrace(before)
        os.close(doomed._lock._fd)  # as the kernel does
        doomed._lock._fd = -1
        return True
    finally:
        sys.settrace(before)
    doomed.close()
    return False


@pytest.mark.parametrize("operation", [store_more, drop_leased, read_all, fill_room, detach_room])
def test_a_death_after_any_line_leaves_a_whole_arena(operation: Callable[[Arena], None], arena_path: Path) -> None:
    deaths = 0
    while True:
        arena = Arena.create(arena_path, 12 * PAGE, slots=6, owners=4)
        for key in (A, B, C, D):
            put(arena, key, content(key))
        died = die_during(operation, arena_path, deaths)
        for key in (A, B, C, D, NEW):
            dest = bytearray(6 * PAGE)
            meta = get_into(arena, key, dest)  # verifies the checksum
            if meta is not None:
                assert dest[: 3 * PAGE] == content(key)
        stats = arena.stats()
        assert stats.features == sum(arena.contains(key) for key in (A, B, C, D, NEW))
        assert stats.used_bytes <= stats.capacity_bytes
        for slot, *_ in arena._table.by_use():
            assert arena._table.tenant[slot] == tenant_of(arena._table.meta(slot).key), "a row is whole, or not there"
        assert put(arena, "all", bytes(12 * PAGE)), "no space is lost"
        stats = arena.stats()
        assert (stats.features, stats.leased, stats.used_bytes) == (1, 0, 12 * PAGE)
        for number in range(6):
            assert put(arena, f"slot {number}", b"x"), "no slot is lost"
        assert arena.stats().features == 6
        arena.close()
        Arena.unlink(arena_path)
        if not died:
            break
        deaths += 1
    assert deaths > 20, "the operation has many lines"
