"""One process: what goes in comes out, what does not fit is refused, what is corrupt is never served."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import store.arena.arena
import store.feature
from store.arena import Arena
from store.errors import CorruptFeatureError, StoreError, StoreFullError
from store.feature import Bytes, checksum
from tests.store.conftest import CAPACITY, get_into
from tests.waiting import PATIENCE_S, wait_for

PAGE = 4096


def put(arena: Arena, key: str, data: bytes = b"x") -> bool:
    return arena.put(key, data, shape=(len(data),), dtype="uint8")


def get(arena: Arena, key: str, nbytes: int = 1) -> bytes | None:
    dest = bytearray(nbytes)
    return None if get_into(arena, key, dest) is None else bytes(dest)


def flip_a_bit(arena: Arena, key: str) -> None:
    lease = arena.lease(key, verify=False)
    assert lease is not None
    arena.memory()[lease.offset] ^= 1
    lease.release()


def test_a_feature_comes_back_with_its_shape_and_dtype(arena: Arena) -> None:
    data = np.arange(6000, dtype=np.float32).reshape(3, 2, 1000)
    assert arena.put("image", data, shape=data.shape, dtype="float32")
    assert arena.contains("image")
    dest = np.empty_like(data)
    meta = get_into(arena, "image", dest)
    assert meta is not None and meta.checksum is not None
    assert (meta.key, meta.shape, meta.dtype, meta.nbytes) == ("image", (3, 2, 1000), "float32", 24000)
    assert np.array_equal(dest, data)


def test_a_missing_feature_is_none_not_an_error(arena: Arena) -> None:
    assert arena.lease("absent") is None
    assert get_into(arena, "absent", bytearray(1)) is None
    assert not arena.contains("absent")
    assert not arena.remove("absent")
    assert arena.stats().misses == 2


def test_the_first_of_two_puts_stays(arena: Arena) -> None:
    assert put(arena, "k", b"first")
    assert not put(arena, "k", b"second")
    assert get(arena, "k", 5) == b"first"
    assert arena.stats().puts == 1


def test_a_put_that_is_under_way_is_not_readable(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def look(target: object, source: object) -> int:
        seen.extend([arena.contains("k"), arena.lease("k"), put(arena, "k"), arena.remove("k")])
        return 0

    monkeypatch.setattr(store.arena.arena, "copy_with_checksum", look)
    assert put(arena, "k")
    assert seen == [False, None, False, False]


def test_a_put_that_fails_leaves_nothing(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(target: object, source: object) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(store.arena.arena, "copy_with_checksum", fail)
        with pytest.raises(KeyboardInterrupt):
            put(arena, "k")
    assert not arena.contains("k")
    assert put(arena, "k")
    assert arena.stats().used_bytes == PAGE


def test_a_view_is_read_only_and_ends_with_the_lease(arena: Arena) -> None:
    put(arena, "k", b"abc")
    lease = arena.lease("k")
    assert lease is not None
    with lease:
        view = lease.view()
        assert view == b"abc"
        with pytest.raises(TypeError):
            view[0] = 0
    with pytest.raises(StoreError, match="released"):
        lease.view()


def test_a_lease_can_be_released_many_times_and_counts_once(arena: Arena) -> None:
    put(arena, "k")
    one, other = arena.lease("k"), arena.lease("k")
    assert one is not None and other is not None
    one.release()
    one.release()
    assert arena.stats().leased == 1
    other.release()
    assert arena.stats().leased == 0


def test_the_least_recently_used_feature_is_evicted(arena: Arena) -> None:
    for name in "abcd":
        put(arena, name, bytes(16 * PAGE))
    get(arena, "a", 16 * PAGE)
    put(arena, "e", bytes(16 * PAGE))
    assert [name for name in "abcde" if arena.contains(name)] == ["a", "c", "d", "e"]
    assert arena.stats().evictions == 1


def test_eviction_never_touches_a_leased_feature(arena: Arena) -> None:
    put(arena, "pinned", b"p" * PAGE)
    lease = arena.lease("pinned")
    assert lease is not None
    for number in range(500):
        put(arena, f"k{number}", bytes(5 * PAGE))
    assert lease.view() == b"p" * PAGE
    lease.release()
    for number in range(500, 600):
        put(arena, f"k{number}", bytes(5 * PAGE))
    assert not arena.contains("pinned")


def test_a_full_arena_of_leased_features_refuses_and_recovers(arena: Arena) -> None:
    put(arena, "a", bytes(40 * PAGE))
    lease = arena.lease("a")
    assert lease is not None
    with pytest.raises(StoreFullError, match="leased"):
        put(arena, "b", bytes(40 * PAGE))
    lease.release()
    assert put(arena, "b", bytes(40 * PAGE))


def test_what_was_just_stored_or_seen_is_spared_for_a_while_and_what_has_served_is_not(
    arena: Arena, arena_path: Path
) -> None:
    spares = Arena.attach(arena_path, spare_s=PATIENCE_S)
    assert put(spares, "k", bytes(CAPACITY))
    with pytest.raises(StoreFullError):
        put(spares, "next")
    with spares.lease("k") as seen:  # type: ignore[union-attr]
        assert seen.nbytes == CAPACITY
    with pytest.raises(StoreFullError):
        put(spares, "next")
    (used,) = spares.lease_all(["k"]) or ()
    with pytest.raises(StoreFullError):
        put(spares, "next")
    used.release()
    assert put(spares, "next"), "room comes back at the pace of those who use it"
    spares.close()


def test_a_feature_larger_than_the_arena_is_refused_without_evicting(arena: Arena) -> None:
    put(arena, "small")
    with pytest.raises(StoreFullError):
        put(arena, "huge", bytes(65 * PAGE))
    assert arena.contains("small")


def test_small_features_give_way_to_a_large_one(arena: Arena) -> None:
    for number in range(32):
        put(arena, f"k{number}", bytes(2 * PAGE))
    lease = arena.lease("k3")
    assert lease is not None
    assert put(arena, "large", bytes(50 * PAGE))
    assert arena.contains("k3")
    lease.release()


def test_running_out_of_slots_evicts(arena: Arena) -> None:
    for number in range(40):
        assert put(arena, f"k{number}")
    assert arena.stats().features == 32
    assert not arena.contains("k7") and arena.contains("k8")


def test_a_corrupt_feature_is_an_error_once_and_missing_afterwards(arena: Arena) -> None:
    put(arena, "k", b"abc")
    flip_a_bit(arena, "k")
    with pytest.raises(CorruptFeatureError, match="k: checksum"):
        arena.lease("k")
    assert arena.lease("k") is None
    stats = arena.stats()
    assert (stats.corrupt, stats.features, stats.leased, stats.used_bytes) == (1, 0, 0, 0)
    assert put(arena, "k", b"abc")


def test_without_verification_corruption_passes(arena: Arena) -> None:
    put(arena, "k", b"abc")
    flip_a_bit(arena, "k")
    assert get_into(arena, "k", bytearray(3), verify=False) is not None


def test_a_removed_feature_is_missing_at_once_but_its_bytes_outlive_its_leases(arena: Arena) -> None:
    put(arena, "k", b"old")
    lease = arena.lease("k")
    assert lease is not None
    assert arena.remove("k")
    assert not arena.contains("k") and not arena.remove("k")
    assert put(arena, "k", b"new")
    assert lease.view() == b"old" and get(arena, "k", 3) == b"new"
    assert arena.stats().used_bytes == 2 * PAGE
    lease.release()
    assert arena.stats().used_bytes == PAGE


def test_bad_arguments_are_named(arena: Arena) -> None:
    put(arena, "k", b"abc")
    with pytest.raises(StoreError, match="at least one byte"):
        put(arena, "empty", b"")
    with pytest.raises(StoreError, match="key of 0 bytes"):
        put(arena, "")
    with pytest.raises(StoreError, match="key of 200 bytes"):
        arena.contains("k" * 200)
    with pytest.raises(StoreError, match="dimensions"):
        arena.put("x", b"x", shape=(1,) * 9, dtype="uint8")
    with pytest.raises(StoreError, match="dimensions"):
        arena.put("x", b"x", shape=(-1,), dtype="uint8")
    with pytest.raises(StoreError, match="not a contiguous buffer"):
        arena.put("x", np.zeros((4, 4))[:, ::2], shape=(4, 2), dtype="float64")
    with pytest.raises(StoreError, match="no 9 bytes"):
        arena.view(64 * PAGE - 8, 9)
    assert arena.stats().leased == 0


def test_attaching_to_what_is_no_arena_says_so(arena_path: Path) -> None:
    with pytest.raises(StoreError, match="not there; containers"):
        Arena.attach(arena_path)
    for content in (b"", b"text", bytes(1 << 20)):
        arena_path.write_bytes(content)
        with pytest.raises(StoreError, match="is not an arena"):
            Arena.attach(arena_path)
    with pytest.raises(StoreError):
        Arena.attach("/dev/shm")


def test_attaching_to_a_truncated_arena_says_so(arena: Arena, arena_path: Path) -> None:
    os.truncate(arena_path, arena_path.stat().st_size - PAGE)
    with pytest.raises(StoreError, match="damaged"):
        Arena.attach(arena_path)


def test_an_arena_is_never_made_over_an_existing_file(arena: Arena, arena_path: Path) -> None:
    with pytest.raises(StoreError, match="File exists"):
        Arena.create(arena_path, PAGE)
    assert arena_path.exists()


def test_more_than_the_machine_has_is_refused_at_creation(arena_path: Path) -> None:
    with pytest.raises(StoreError, match="No space left"):
        Arena.create(arena_path, 1 << 50)
    assert not arena_path.exists()


def test_closing_ends_leases_and_unmaps_when_the_last_view_is_gone(arena: Arena, arena_path: Path) -> None:
    other = Arena.attach(arena_path)
    put(arena, "k", b"abc")
    lease = other.lease("k")
    assert lease is not None
    view = lease.view()
    other.close()
    other.close()
    lease.release()
    assert arena.stats().leased == 0
    assert view == b"abc"
    for use in (lambda: other.contains("k"), lambda: put(other, "x"), other.stats, lambda: other.view(0, 1)):
        with pytest.raises(StoreError):
            use()
    arena.close()
    del view
    gc.collect()
    assert str(arena_path) not in Path("/proc/self/maps").read_text()


def test_a_stopped_lock_holder_costs_a_deadline_not_a_hang(arena: Arena, arena_path: Path) -> None:
    waiting = Arena.attach(arena_path, lock_timeout_s=0.05)
    with arena._index(), pytest.raises(StoreError, match=f"process {os.getpid()} held the lock"):
        waiting.contains("k")
    assert not waiting.contains("k")
    waiting.close()


def test_room_that_could_not_be_given_back_for_the_lock_goes_back_by_itself(arena: Arena, arena_path: Path) -> None:
    impatient = Arena.attach(arena_path, lock_timeout_s=0.05)
    room = impatient.reserve("k", CAPACITY)
    assert room is not None
    with arena._index():
        room.abandon()
    wait_for(lambda: not arena.stats().used_bytes)
    room.detach()  # what the fetch that failed does next
    assert arena.put("k", bytes(CAPACITY), shape=(CAPACITY,), dtype="uint8")
    impatient.close()


def test_a_corrupt_feature_is_dropped_whoever_has_the_lock(
    arena: Arena, arena_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient = Arena.attach(arena_path, lock_timeout_s=0.05)
    put(arena, "k", b"abc")
    flip_a_bit(arena, "k")
    neighbour = contextlib.ExitStack()

    def checksum_while_the_neighbour_comes(data: Bytes) -> int:
        neighbour.enter_context(arena._index())
        return checksum(data)

    monkeypatch.setattr(store.feature, "checksum", checksum_while_the_neighbour_comes)
    with neighbour, pytest.raises(CorruptFeatureError, match="k: checksum"):
        impatient.lease("k")
    monkeypatch.undo()
    assert (arena.stats().leased, arena.stats().corrupt) == (0, 1) and not arena.contains("k")
    assert put(impatient, "k", b"abc")
    impatient.close()


def test_a_lease_that_two_threads_release_at_once_counts_once(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    put(arena, "k")
    lease, kept = arena.lease("k"), arena.lease("k")
    assert lease is not None and kept is not None
    unpin, other = arena._table.unpin, threading.Thread(target=lease.release)

    def unpin_while_the_other_comes(slot: int, owner: int, **how: bool) -> None:
        if other.ident is None:
            other.start()
            other.join(0.05)
        unpin(slot, owner, **how)

    monkeypatch.setattr(arena._table, "unpin", unpin_while_the_other_comes)
    lease.release()
    other.join(PATIENCE_S)
    assert arena.stats().leased == 1, "the other lease lasts"
    kept.release()
    assert arena.stats().leased == 0


def test_leases_that_end_while_others_begin_are_all_counted(
    arena: Arena, arena_path: Path, request: pytest.FixtureRequest
) -> None:
    """Giving back needs no lock of the arena: counts must not be lost to threads that pin, or to whoever evicts."""
    request.addfinalizer(functools.partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1e-6)
    neighbour = Arena.attach(arena_path)
    put(arena, "k", b"whole")
    stop = threading.Event()

    def pin() -> None:
        while not stop.is_set():
            lease = arena.lease("k", verify=False)
            if lease is not None:
                assert lease.view() == b"whole"
                lease.release()

    def evict() -> None:
        while not stop.is_set():
            neighbour.put("other", bytes(63 * PAGE), shape=(1,), dtype="uint8")
            neighbour.remove("other")
            put(neighbour, "k", b"whole")

    failures: list[BaseException] = []

    def running(what: Callable[[], None]) -> None:
        try:
            what()
        except BaseException as error:  # noqa: BLE001 - it is raised where the test waits
            failures.append(error)

    threads = [threading.Thread(target=running, args=(what,)) for what in (pin, pin, pin, evict)]
    for thread in threads:
        thread.start()
    before = arena.stats().hits
    wait_for(lambda: failures or arena.stats().hits > before + 2000)
    stop.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not failures and arena.stats().leased == 0
    assert put(arena, "all", bytes(64 * PAGE)), "nothing is held by a count that went wrong"
    neighbour.close()


def test_whoever_closes_is_not_stopped_by_the_holder_of_the_lock(
    arena: Arena, arena_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    impatient = Arena.attach(arena_path, lock_timeout_s=0.05)
    put(arena, "k")
    assert impatient.lease("k") is not None
    with arena._index():
        impatient.close()
    assert "stays open until this process ends" in caplog.text
    assert arena.stats().leased == 1
    impatient.close()
    assert arena.stats().leased == 0


def test_threads_share_an_arena(arena: Arena) -> None:
    wrong: list[bytes | None] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for number in rng.integers(0, 40, 300):
            data = bytes([number]) * int(1 + number * 700)
            put(arena, str(number), data)
            found = get(arena, str(number), len(data))
            if found not in (None, data):
                wrong.append(found)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong
    assert arena.stats().leased == 0
