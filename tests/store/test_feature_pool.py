"""The way between the tiers, with a second tier that a test holds in its hands."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from store.arena import Arena
from store.feature import FeatureMeta
from store.feature_pool import FeaturePool
from tests.waiting import PATIENCE_S

ZEROS = xxhash.xxh3_64_intdigest(bytes(64))


class Tier:
    """Counts what it is asked; its one value is 64 bytes."""

    def __init__(self) -> None:
        self.asked = 0
        self.was_asked = threading.Event()

    def close(self) -> None: ...

    def deadline_s(self, nbytes: int) -> float:
        return PATIENCE_S

    def size(self, key: str) -> int | None:
        self.asked += 1
        self.was_asked.set()
        return 64

    def fetch_into(self, key: str, address: int, nbytes: int, *, on_failure: Callable[[], None]) -> FeatureMeta | None:
        return FeatureMeta(key, (64,), "uint8", 64, ZEROS)

    def put_from(self, meta: FeatureMeta, address: int, *, on_failure: Callable[[], None]) -> None: ...


def test_waiting_for_another_fetch_of_the_same_feature_asks_the_network_once(arena: Arena) -> None:
    tier: Any = Tier()
    pool = FeaturePool(Arena.attach(arena.path), tier)
    room = arena.reserve("k", 64)
    assert room is not None

    def other_fetch() -> None:
        assert tier.was_asked.wait(PATIENCE_S)
        threading.Event().wait(0.05)  # so that the fetch finds the key taken, as a rule
        room.commit(FeatureMeta("k", (64,), "uint8", 64, ZEROS)).release()

    other = threading.Thread(target=other_fetch)
    other.start()
    lease = pool.fetch("k")
    assert lease is not None and tier.asked == 1
    lease.release()
    other.join(PATIENCE_S)
    pool.close()


def test_a_lease_goes_back_while_the_lock_is_stuck(arena: Arena, arena_path: Path) -> None:
    tier: Any = Tier()
    pool = FeaturePool(Arena.attach(arena_path, lock_timeout_s=0.05), tier)
    assert pool.arena.put("k", b"x", shape=(1,), dtype="uint8")
    held = threading.Event()

    def hold(*_: object, **__: object) -> None:
        arena._lock.acquire(1.0)
        held.set()

    tier.put_from = hold
    try:
        assert pool.publish("k")
    finally:
        assert held.is_set()
        arena._lock.release()
    assert arena.stats().leased == 0
    pool.close()
