"""Where a consumer's features come from: what its listener asks, whichever way leads to the bytes.

`HostSource` is the way through the arena of this host; `direct_source.py` has the one that ends in device memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from epd_serve import wire
from epd_serve.engine.ec.device_ledger import DevicePin
from store.arena.lease import Lease
from store.feature_pool import FeaturePool, PoolState

Held = Lease | DevicePin
"""A verified feature that stays where it is until `release`: in the arena, or in device memory of all workers."""


class FeatureSource(Protocol):
    """Thread-safe. No method is called under a lock of the consumer's."""

    @property
    def state(self) -> PoolState:
        """Of the second tier."""

    @property
    def capacity_bytes(self) -> int:
        """Room for features where they are held; what is pinned there without need has to be a small part of it."""

    def hear(self, event: wire.FeatureReady | wire.StoreReport) -> None:
        """An announcement that tells where features are, or how to get at them. Never blocks."""

    def reaches(self, event: wire.FeatureReady) -> bool:
        """Whether what the second tier has of this feature can be fetched from here."""

    def lease_local(self, key: str) -> Held | None:
        """A feature that needs no fetch. Never waits for a network. Raises as `FeaturePool.lease_local`."""

    def fetch(self, key: str) -> Held | None:
        """Blocks, at most its own deadline; None when nobody has it. Raises as `FeaturePool.fetch`."""

    def counters(self) -> Mapping[str, int]:
        """For the store report."""

    def close(self) -> None: ...


def remote_counters(pool: FeaturePool) -> dict[str, int]:
    """What this process did with the second tier, as a `StoreReport` counts it; nothing where there is none."""
    return {f"pool.{name}": count for name, count in pool.remote_counts().items() if count}


class HostSource:
    """The arena, filled from the second tier where there is one. Owns the pool."""

    def __init__(self, pool: FeaturePool) -> None:
        self.pool = pool

    @property
    def state(self) -> PoolState:
        return self.pool.pool_state

    @property
    def capacity_bytes(self) -> int:
        return self.pool.stats().capacity_bytes

    def hear(self, event: wire.FeatureReady | wire.StoreReport) -> None:
        """The index is asked instead."""

    def reaches(self, event: wire.FeatureReady) -> bool:
        return event.host != wire.NO_ARENA

    def lease_local(self, key: str) -> Held | None:
        return self.pool.lease_local(key)

    def fetch(self, key: str) -> Held | None:
        return self.pool.fetch(key)

    def counters(self) -> Mapping[str, int]:
        return remote_counters(self.pool)

    def close(self) -> None:
        self.pool.close()
