"""The MM Store as a stage sees it: the arena of its host, and behind it, where there is one, the tier that joins hosts.

Owns the way between the two tiers. A feature is always used from the arena; the second tier is filled straight from an
arena slot and read straight into one, and what it delivers is readable here only after its checksum was verified.
The names that end in `_local` never leave the host. Trouble with the second tier never costs a feature that is here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from store.arena import Arena
from store.arena.lease import Lease
from store.arena.reservation import Reservation
from store.checksum import Buffer
from store.codec import verify_payload
from store.errors import CorruptFeatureError, StoreError, StoreFullError, StoreUnavailableError
from store.feature import FeatureMeta, StoreStats
from store.interface import FeatureStore
from store.mooncake.client import MooncakeConfig
from store.mooncake.tier import MooncakeStore

log = logging.getLogger(__name__)
PoolState = Literal["none", "up", "down"]
_OTHER_FETCH_NAP_S = 0.001


@dataclass(slots=True)
class RemoteCounts:
    """What this process did with the second tier; all only grow.

    Attributes:
        published: features it holds because of us, or held already.
        publish_full, publish_failed: publishing found no room there; found no answer.
        fetched, fetched_bytes: brought into the arena.
        fetch_missing, fetch_corrupt, fetch_full, fetch_failed: the second tier did not have it; had it wrong; the arena
            had no room; there was no answer in time.
        late_calls, openings: see `store.mooncake.breaker.Guard`.
    """

    published: int = 0
    publish_full: int = 0
    publish_failed: int = 0
    fetched: int = 0
    fetched_bytes: int = 0
    fetch_missing: int = 0
    fetch_corrupt: int = 0
    fetch_full: int = 0
    fetch_failed: int = 0
    late_calls: int = 0
    openings: int = 0


class FeaturePool:
    """A `store.interface.FeatureStore` of one or two tiers. Thread-safe. Owns both: `close` closes them."""

    def __init__(self, arena: Arena, remote: MooncakeStore | None = None) -> None:
        self.arena = arena
        self._remote = remote
        self._memory = arena.memory()  # stays mapped while a transfer that was given up may write to it
        self._counts = RemoteCounts()
        self._counting = threading.Lock()
        self._kept: list[Lease] = []  # that could not be given back yet
        if remote is not None:
            remote.register(self._memory.ctypes.data, self._memory.nbytes)

    @property
    def pool_state(self) -> PoolState:
        """Of the second tier: there is `none`, or it is `up`, or `down` (calls fail at once until it answers)."""
        return "none" if self._remote is None else self._remote.state

    def wait_until_up(self, timeout_s: float) -> bool:
        """Waits until the second tier answers; True at once when there is none."""
        return self._remote is None or self._remote.guard.wait_until_up(timeout_s)

    def put(self, key: str, data: Buffer, *, shape: Sequence[int], dtype: str) -> bool:
        """Puts into the arena, then publishes. What the second tier refuses is counted and logged, not raised.

        See `FeatureStore.put`.
        """
        stored = self.put_local(key, data, shape=shape, dtype=dtype)
        if stored:
            try:
                self.publish(key)
            except (StoreFullError, StoreUnavailableError, CorruptFeatureError) as error:
                log.warning("not in the second tier: %s", error)
        return stored

    def put_local(self, key: str, data: Buffer, *, shape: Sequence[int], dtype: str) -> bool:
        """See `FeatureStore.put`."""
        return self.arena.put(key, data, shape=shape, dtype=dtype)

    def publish(self, key: str) -> bool:
        """Copies a feature of the arena to the second tier. True when that holds it, from us or from somebody else.

        False when there is no second tier, or the arena does not have the feature (any more).

        Raises:
            StoreUnavailableError: no answer in time, or another writer has not finished; `retry_after_s`.
            StoreFullError: no room there.
            CorruptFeatureError: the arena's copy is damaged; it is dropped.
        """
        if self._remote is None:
            return False
        lease = self.arena.lease(key)
        if lease is None:
            return False
        try:
            self._remote.put_from(lease.meta, self._address(lease), on_failure=lambda: self._give_back(lease))
        except StoreFullError:
            self._count(publish_full=1)
            raise
        except StoreError:
            self._count(publish_failed=1)
            raise
        self._give_back(lease)
        self._count(published=1)
        return True

    def contains(self, key: str) -> bool:
        """In the arena, or in a second tier that answers. A hint: only a lease keeps it."""
        if self.arena.contains(key):
            return True
        if self._remote is None:
            return False
        try:
            return self._remote.contains(key)
        except StoreUnavailableError:
            return False

    def contains_local(self, key: str) -> bool:
        """In the arena: never leaves the host, never waits for a network."""
        return self.arena.contains(key)

    def lease_local(self, key: str, *, verify: bool = True) -> Lease | None:
        """See `FeatureStore.lease`; the arena only."""
        return self.arena.lease(key, verify=verify)

    def fetch(self, key: str) -> Lease | None:
        """The feature, brought into the arena if it is not there; None when the second tier does not have it either.

        Blocks, but not past the deadline of the second tier. When another process or thread is already bringing it,
        waits for that.

        Raises:
            StoreUnavailableError: no answer in time.
            StoreFullError: no room in the arena.
            CorruptFeatureError: what the second tier delivered is damaged; it is dropped there.
        """
        if self._remote is None:
            return self.arena.lease(key)
        try:
            lease = self._fetch(self._remote, key)
        except CorruptFeatureError:
            self._count(fetch_corrupt=1)
            raise
        except StoreFullError:
            self._count(fetch_full=1)
            raise
        except StoreError:
            self._count(fetch_failed=1)
            raise
        if lease is None:
            self._count(fetch_missing=1)
        return lease

    def lease(self, key: str, *, verify: bool = True) -> Lease | None:
        """See `FeatureStore.lease`: from the arena, else `fetch`, with all that it raises."""
        lease = self.lease_local(key, verify=verify)
        if lease is not None or self._remote is None:
            return lease
        return self.fetch(key)

    def get_into(self, key: str, dest: Buffer, *, verify: bool = True) -> FeatureMeta | None:
        """See `FeatureStore.get_into`."""
        if not self.arena.contains(key) and self._remote is not None:
            lease = self.fetch(key)
            if lease is None:
                return None
            with lease:
                return self.arena.get_into(key, dest, verify=False)  # fetch has just verified it
        return self.arena.get_into(key, dest, verify=verify)

    def remove(self, key: str) -> bool:
        """See `FeatureStore.remove`: from both tiers.

        Raises:
            StoreUnavailableError: the second tier does not answer; gone from the arena nevertheless.
        """
        here = self.arena.remove(key)
        there = self._remote is not None and self._remote.remove(key)
        return here or there

    def stats(self) -> StoreStats:
        """Of the arena, all its processes together."""
        return self.arena.stats()

    def remote_counts(self) -> dict[str, int]:
        """`RemoteCounts` of this process, by name."""
        with self._counting:
            counts = asdict(self._counts)
        if self._remote is not None:
            counts.update(late_calls=self._remote.guard.late_calls, openings=self._remote.guard.openings)
        return counts

    def close(self) -> None:
        """Leaves both tiers. What a stuck transfer may still write stays taken until this process ends."""
        if self._remote is not None:
            self._remote.close()
        self.arena.close()

    def _fetch(self, remote: MooncakeStore, key: str) -> Lease | None:
        lease = self.arena.lease(key)
        if lease is not None:
            return lease
        nbytes = remote.size(key)
        if nbytes is None:
            return None
        deadline = time.monotonic() + remote.deadline_s(nbytes)
        while True:
            reservation = self.arena.reserve(key, nbytes)
            if reservation is not None:
                return self._fill(remote, reservation)
            if time.monotonic() > deadline:
                raise StoreUnavailableError(f"{key}: somebody else who stores it does not finish")
            time.sleep(_OTHER_FETCH_NAP_S)
            lease = self.arena.lease(key)
            if lease is not None:
                return lease

    def _fill(self, remote: MooncakeStore, reservation: Reservation) -> Lease | None:
        try:
            key, address, nbytes = reservation.key, reservation.address, reservation.nbytes
            meta = remote.fetch_into(key, address, nbytes, on_failure=reservation.abandon)
        except BaseException:
            # A transfer that was given up may write there until `on_failure`; the key is free again.
            reservation.detach()
            raise
        try:
            if meta is None:
                return None
            try:
                verify_payload(meta, reservation.data)
            except CorruptFeatureError:
                remote.drop_corrupt(reservation.key)
                raise
            lease = reservation.commit(meta)
        finally:
            reservation.abandon()  # unless committed
        self._count(fetched=1, fetched_bytes=reservation.nbytes)
        return lease

    def _give_back(self, lease: Lease) -> None:
        with self._counting:
            leases, self._kept = [*self._kept, lease], []
        while leases:
            try:
                leases[-1].release()
            except StoreError as error:  # the arena does not answer: tried again with the next one
                log.warning("a feature stays leased for now: %s", error)
                break
            leases.pop()
        with self._counting:
            self._kept += leases

    def _address(self, lease: Lease) -> int:
        return int(self._memory.ctypes.data) + lease.offset

    def _count(self, **amounts: int) -> None:
        with self._counting:
            for name, amount in amounts.items():
                setattr(self._counts, name, getattr(self._counts, name) + amount)


def open_pool(*, arena: str, mooncake: MooncakeConfig | None = None) -> FeaturePool:
    """Opens the MM Store of a stage: its host's arena, and the second tier if the deployment has one.

    Attaches the arena at once and connects to the second tier in the background, so its absence delays no start.
    Without `mooncake` nothing of Mooncake is imported.

    Raises:
        StoreError: there is no such arena, or Mooncake is wanted and not installed.
    """
    attached = Arena.attach(arena)
    if mooncake is None:
        return FeaturePool(attached)
    try:
        return FeaturePool(attached, MooncakeStore(mooncake))
    except BaseException:
        attached.close()
        raise


if TYPE_CHECKING:
    _is_a_tier: type[FeatureStore] = FeaturePool
