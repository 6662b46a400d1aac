"""What the store promises, of the arena alone and with a real Mooncake Store behind it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from store.arena import Arena, Lease
from store.errors import CorruptFeatureError, StoreError, StoreFullError
from store.feature import Buffer
from store.feature_pool import FeaturePool
from store.mooncake.client import MooncakeClient
from store.mooncake.tier import MooncakeStore
from tests.store.conftest import Master
from tests.waiting import PATIENCE_S, wait_for

MB = 1 << 20


class Stacked:
    """Both tiers as a stage uses them: what is put is published, what is not here is fetched."""

    def __init__(self, pool: FeaturePool) -> None:
        self.pool = pool
        self.remove, self.stats, self.close = pool.remove, pool.arena.stats, pool.close

    def put(self, key: str, data: Buffer, *, shape: Sequence[int], dtype: str) -> bool:
        return self.pool.arena.put(key, data, shape=shape, dtype=dtype) and (self.pool.publish(key) or True)

    def contains(self, key: str) -> bool:
        remote: Any = self.pool._remote
        return self.pool.arena.contains(key) or remote.size(key) is not None

    def lease(self, key: str) -> Lease | None:
        return self.pool.fetch(key)


Tier = Arena | Stacked
Open = Callable[[int], Tier]

LAYERS = ["arena", pytest.param("both", marks=pytest.mark.mooncake)]
WITH_CLIENTS_OF_THEIR_OWN = ["arena", pytest.param("both", marks=[pytest.mark.mooncake, pytest.mark.slow])]
"""A Mooncake client of a test's own takes two seconds to close."""


@pytest.fixture(scope="session")
def shared_remote(shared_master: Master) -> Iterator[MooncakeStore]:
    """To leave a Mooncake Store takes two seconds, so most tests share one, emptied in between."""
    remote = MooncakeStore.connect(shared_master.config(segment_bytes=32 * MB))
    yield remote
    remote.close()


@pytest.fixture(params=LAYERS)
def open_tier(request: pytest.FixtureRequest, arena_path: Path) -> Iterator[Open]:
    """Opens the tier with a given capacity, 32 MB if the test does not close it; it is left after the test."""
    opened: list[Tier] = []
    left: list[Arena | MooncakeStore] = []
    shared: list[tuple[MooncakeClient, int]] = []

    def open_one(capacity: int) -> Tier:
        if request.param == "arena":
            opened.append(Arena.create(arena_path, capacity, slots=64))
            return opened[0]
        if capacity == 32 * MB:
            remote: MooncakeStore = request.getfixturevalue("shared_remote")
            assert remote.client is not None
            remote.client._store.remove_all(True)
        else:
            remote = MooncakeStore.connect(request.getfixturevalue("shared_master").config(segment_bytes=capacity))
            left.append(remote)
        arena = Arena.create(arena_path, capacity, slots=64)
        left.append(arena)
        assert remote.client is not None  # made before the arena that it serves
        address, nbytes = arena.memory().ctypes.data, arena.memory().nbytes
        remote.client.register(address, nbytes)
        if capacity == 32 * MB:
            shared.append((remote.client, address))
        opened.append(Stacked(FeaturePool(arena, remote)))
        return opened[-1]

    yield open_one
    for client, address in shared:  # a pool lives as long as its tiers; here this tier outlives the pool's arena
        client.unregister(address)
    for one in left:
        one.close()
    for tier in opened:
        if isinstance(tier, Arena):
            tier.close()


@pytest.fixture
def tier(open_tier: Open) -> Tier:
    return open_tier(32 * MB)


def put(tier: Tier, key: str, data: bytes) -> bool:
    return tier.put(key, data, shape=(len(data),), dtype="uint8")


def get(tier: Tier, key: str) -> bytes | None:
    lease = tier.lease(key)
    if lease is None:
        return None
    with lease:
        return bytes(lease.view())


def flip_a_bit(tier: Tier, key: str) -> None:
    """In the bytes that lie in this process, in every tier."""
    arena = tier if isinstance(tier, Arena) else tier.pool.arena
    lease = arena.lease(key, verify=False)
    assert lease is not None
    arena.memory()[lease.offset + 5] ^= 16
    lease.release()
    if isinstance(tier, Stacked):
        remote: Any = tier.pool._remote
        place = (
            remote.client._store.get_replica_desc(remote.config.namespace + key)[0]
            .get_memory_descriptor()
            .buffer_descriptor
        )
        ctypes.c_uint8.from_address(place.buffer_address + 5).value ^= 16


def test_a_feature_comes_back_with_its_shape_and_dtype(tier: Tier) -> None:
    data = np.arange(300_000, dtype=np.float32).reshape(3, 2, 50_000)
    assert tier.put("image", data, shape=data.shape, dtype="float32")
    assert tier.contains("image")
    lease = tier.lease("image")
    assert lease is not None and lease.meta.checksum
    meta = lease.meta
    assert (meta.key, meta.shape, meta.dtype, meta.nbytes) == ("image", (3, 2, 50_000), "float32", data.nbytes)
    assert lease.view() == data.tobytes()
    lease.release()


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, MB + 1])
def test_every_size_comes_back(tier: Tier, nbytes: int) -> None:
    data = np.random.default_rng(nbytes).bytes(nbytes)
    assert put(tier, "k", data)
    assert get(tier, "k") == data


def test_a_missing_feature_is_none_not_an_error(tier: Tier) -> None:
    assert tier.lease("absent") is None
    assert not tier.contains("absent")
    assert not tier.remove("absent")
    assert tier.stats().misses >= 1


def test_the_first_of_two_puts_stays(tier: Tier) -> None:
    assert put(tier, "k", b"first")
    assert not put(tier, "k", b"second")
    assert get(tier, "k") == b"first"
    assert tier.stats().puts == 1


def test_a_lease_outlives_the_removal_of_its_feature(tier: Tier) -> None:
    put(tier, "k", b"leased")
    lease = tier.lease("k")
    assert lease is not None
    assert tier.remove("k") and not tier.contains("k") and get(tier, "k") is None
    for number in range(8):
        put(tier, f"other {number}", bytes(MB))
    assert bytes(lease.view()) == b"leased"
    lease.release()
    lease.release()
    with pytest.raises(StoreError):
        lease.view()
    assert put(tier, "k", b"again") and get(tier, "k") == b"again"


def test_a_full_store_makes_room(tier: Tier) -> None:
    """Twice what fits. A tier may say that it is full while what was just used is pinned, but not for long."""

    def has_room_for(number: int) -> bool:
        try:
            tier.put(f"k{number}", bytes([number]) * (4 * MB), shape=(4 * MB,), dtype="uint8")
        except StoreFullError:
            return False
        return True

    for number in range(16):
        wait_for(lambda number=number: has_room_for(number), f"room for feature {number}")
    assert get(tier, "k15") == bytes([15]) * (4 * MB)
    here = [number for number in range(16) if get(tier, f"k{number}") == bytes([number]) * (4 * MB)]
    missing = [number for number in range(16) if get(tier, f"k{number}") is None]
    assert sorted(here + missing) == list(range(16)), "right or missing, never wrong"
    assert missing


def test_a_feature_larger_than_the_store_is_refused(tier: Tier) -> None:
    with pytest.raises(StoreFullError):
        put(tier, "k", bytes(40 * MB))
    assert not tier.contains("k")
    assert put(tier, "small", b"fits") and get(tier, "small") == b"fits"


def test_a_corrupt_feature_is_an_error_then_missing(tier: Tier) -> None:
    put(tier, "k", bytes(100_000))
    flip_a_bit(tier, "k")
    with pytest.raises(CorruptFeatureError):
        tier.lease("k")
    if isinstance(tier, Stacked):
        with pytest.raises(CorruptFeatureError):
            tier.lease("k")  # the second tier's copy
    assert tier.lease("k") is None
    assert put(tier, "k", b"whole again") and get(tier, "k") == b"whole again"


def test_what_no_tier_can_hold_is_refused(tier: Tier) -> None:
    for key, data, shape in [("k", b"", (0,)), ("", b"x", (1,)), ("k" * 200, b"x", (1,)), ("k", b"x", (1,) * 9)]:
        with pytest.raises(StoreError):
            tier.put(key, data, shape=shape, dtype="uint8")


def test_writers_of_one_key_leave_one_whole_feature(tier: Tier) -> None:
    contents = [bytes([writer]) * 2 * MB for writer in range(4)]
    start = threading.Barrier(4)
    stored: list[bool] = []

    def write(data: bytes) -> None:
        start.wait(PATIENCE_S)
        stored.append(put(tier, "k", data))

    writers = [threading.Thread(target=write, args=(data,)) for data in contents]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(PATIENCE_S)
    assert any(stored) and len(stored) == 4
    assert get(tier, "k") in contents


def test_writers_of_many_keys_do_not_disturb_each_other(tier: Tier) -> None:
    wrong: list[str] = []

    def work(worker: int) -> None:
        for number in range(6):
            key, data = f"{worker}-{number}", bytes([worker * 16 + number]) * (300_000 + number)
            if not put(tier, key, data) or get(tier, key) != data:
                wrong.append(key)

    workers = [threading.Thread(target=work, args=(worker,)) for worker in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(PATIENCE_S)
    assert wrong == []


@pytest.mark.parametrize("open_tier", WITH_CLIENTS_OF_THEIR_OWN, indirect=True)
def test_a_4k_picture_s_feature_fits(open_tier: Open) -> None:
    tier = open_tier(160 * MB)
    data = np.resize(np.random.default_rng(0).integers(0, 255, 1_000_003, dtype=np.uint8), (16206, 3584 * 2))
    assert tier.put("4k", data, shape=(16206, 3584), dtype="float16")
    assert get(tier, "4k") == data.tobytes()


@pytest.mark.parametrize("open_tier", WITH_CLIENTS_OF_THEIR_OWN, indirect=True)
def test_a_closed_store_refuses(open_tier: Open) -> None:
    tier = open_tier(16 * MB)
    put(tier, "k", b"x")
    tier.close()
    tier.close()
    with pytest.raises(StoreError):
        put(tier, "k", b"x")
    with pytest.raises(StoreError):
        tier.lease("k")
