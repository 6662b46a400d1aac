"""The MM Store as a stage sees it: the arena of its host, and behind it, where there is one, the tier that joins hosts.

Owns the way between the two tiers. A feature is always used from the arena; the second tier is filled straight from an
arena slot and read straight into one, and what it delivers is readable here only after its checksum was verified.
What is asked of `arena` never leaves the host. Trouble with the second tier never costs a feature that is here.
"""

from __future__ import annotations

import time
from typing import Literal

from store.arena import Arena, Lease, Reservation
from store.errors import CorruptFeatureError, StoreUnavailableError
from store.feature import verify_payload
from store.mooncake.client import MooncakeConfig
from store.mooncake.tier import MooncakeStore

PoolState = Literal["none", "up", "down"]
_OTHER_FETCH_NAP_S = 0.001


class FeaturePool:
    """One or two tiers, the second of which moves features where they lie in the first. Thread-safe. Owns both: `close`
    closes them."""

    def __init__(self, arena: Arena, remote: MooncakeStore | None = None) -> None:
        self.arena = arena
        self._remote = remote
        self._memory = arena.memory()  # stays mapped while a transfer that was given up may write to it

    @property
    def state(self) -> PoolState:
        """Of the second tier: there is `none`, or it is `up`, or `down` (calls fail at once until it answers)."""
        return "none" if self._remote is None else self._remote.guard.state

    def publish(self, key: str) -> bool:
        """Copies a feature of the arena to the second tier. True when that holds it, from us or from somebody else.

        False when there is no second tier, or the arena does not have the feature (any more).

        Raises:
            StoreUnavailableError: no answer in time, or another writer has not finished.
            StoreFullError: no room there.
            CorruptFeatureError: the arena's copy is damaged; it is dropped.
        """
        if self._remote is None:
            return False
        lease = self.arena.lease(key)
        if lease is None:
            return False
        address = int(self._memory.ctypes.data) + lease.offset
        self._remote.put_from(lease.meta, address, on_failure=lease.release)
        lease.release()
        return True

    def fetch(self, key: str) -> Lease | None:
        """The feature, brought into the arena if it is not there; None when the second tier does not have it either.

        Blocks, but not past the deadline of the second tier. When another process or thread is already bringing it,
        waits for that.

        Raises:
            StoreUnavailableError: no answer in time.
            StoreFullError: no room in the arena.
            CorruptFeatureError: what the second tier delivered is damaged; it is dropped there.
        """
        lease = self.arena.lease(key)
        if lease is not None or self._remote is None:
            return lease
        try:
            return self._fetch(self._remote, key)
        except CorruptFeatureError:
            self._remote.drop_corrupt(key)
            raise

    def remove(self, key: str) -> bool:
        """Makes the feature missing in both tiers. Whether it was in one.

        Raises:
            StoreUnavailableError: the second tier does not answer; gone from the arena nevertheless.
        """
        here = self.arena.remove(key)
        there = self._remote is not None and self._remote.remove(key)
        return here or there

    def close(self) -> None:
        """Leaves both tiers. What a stuck transfer may still write stays taken until this process ends."""
        if self._remote is not None:
            self._remote.close()
        self.arena.close()

    def _fetch(self, remote: MooncakeStore, key: str) -> Lease | None:
        nbytes = remote.size(key)
        if nbytes is None:
            return None
        deadline = time.monotonic() + remote.deadline_s(nbytes)
        while (room := self.arena.reserve(key, nbytes)) is None:
            if time.monotonic() > deadline:
                raise StoreUnavailableError(f"{key}: somebody else who stores it does not finish")
            time.sleep(_OTHER_FETCH_NAP_S)
            if (lease := self.arena.lease(key)) is not None:
                return lease
        return self._fill(remote, room)

    def _fill(self, remote: MooncakeStore, room: Reservation) -> Lease | None:
        try:
            meta = remote.fetch_into(room.key, room.address, room.nbytes, on_failure=room.abandon)
        except BaseException:
            room.detach()  # a transfer that was given up may write there until `on_failure`; the key is free again
            raise
        try:
            if meta is None:
                return None
            verify_payload(meta, room.data)
            return room.commit(meta)
        finally:
            room.abandon()  # unless committed


def open_pool(*, arena: str, mooncake: MooncakeConfig | None = None, spare_s: float = 0.0) -> FeaturePool:
    """Opens the MM Store of a stage: its host's arena, and the second tier if the deployment has one.

    Attaches the arena at once and connects to the second tier in the background, so its absence delays no start.
    Without `mooncake` nothing of Mooncake is imported. `spare_s`: as in `Arena.attach`.

    Raises:
        StoreError: there is no such arena, or Mooncake is wanted and not installed.
    """
    attached = Arena.attach(arena, spare_s=spare_s)
    try:
        return FeaturePool(attached, None if mooncake is None else MooncakeStore(mooncake, attached.memory()))
    except BaseException:
        attached.close()
        raise
