"""Tier 1 of the MM Store: one shared-memory file per host holds the features of all its processes.

Owns the order of things: room is taken and given under the arena's lock, bytes are copied and checked outside it.
A feature is readable only when its bytes and checksum are complete; a process that dies at any point leaves nothing
readable that is not whole, and what it held is taken back when room is needed.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from store.arena.file import make_file, map_file, open_file
from store.arena.index import FeatureIndex
from store.arena.layout import H_CORRUPT, H_HITS, H_MISSES, H_PUTS, S_OFFSET, SLOT_WORDS, WORD, Geometry, align_up
from store.arena.lease import Lease
from store.arena.lock import ArenaLock
from store.arena.owners import OwnerTable
from store.arena.reservation import Reservation
from store.arena.slots import Name, Record
from store.checksum import Buffer, Bytes, as_bytes, checksum, copy, copy_with_checksum
from store.errors import CorruptFeatureError, StoreError
from store.feature import FeatureEntry, FeatureMeta, StoreStats
from store.interface import FeatureStore

logger = logging.getLogger(__name__)

LOCK_TIMEOUT_S = 5.0


class Arena:
    """A `store.interface.FeatureStore`. Thread-safe; survives fork (the child holds no leases) and spawn (attach)."""

    def __init__(self, path: Path, *, prefault: bool, checksums: bool, lock_timeout_s: float) -> None:
        """For `create` and `attach`."""
        self.path = path
        fd, geometry = open_file(path)
        try:
            file = memoryview(map_file(fd, geometry, prefault=prefault))
            words_end = geometry.words * WORD
            self._words = file[:words_end].cast("Q")
            leases = file[words_end : words_end + geometry.leases_bytes].cast("I")
            self._index = FeatureIndex(file, self._words, leases, geometry, OwnerTable(self._words, geometry, fd))
            self._lock = ArenaLock(fd, self._words, self._index.rebuild, lock_timeout_s)
        finally:
            os.close(fd)
        self._table = geometry.slots_word
        self._features = file[geometry.data_byte :]
        self._checksums = checksums
        self._begin_incarnation()
        _open_arenas.add(self)

    def _begin_incarnation(self) -> None:
        self._incarnation: object = object()  # leases of another incarnation (before a fork, before close) are over
        self._owner: int | None = None  # our owner row, taken with the first put or lease
        self._writing = 0  # puts that have room and are not readable yet
        self._orphans: list[int] = []  # slots of failed puts and reservations that could not be given back yet
        self._unhanded: list[tuple[Lease, bool]] = []  # pins that no caller got and that could not end yet; if corrupt

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        capacity_bytes: int,
        *,
        slots: int = 4096,
        owners: int = 128,
        alignment: int = 4096,
        prefault: bool = True,
        checksums: bool = True,
        lock_timeout_s: float = LOCK_TIMEOUT_S,
    ) -> Self:
        """Makes the arena's file and attaches to it. Who creates it unlinks it.

        Args:
            path: a file that does not exist yet, under /dev/shm.
            capacity_bytes: room for features, rounded up to `alignment`.
            slots: most features at one time.
            owners: most processes at one time.
            alignment: every feature starts at a multiple of it, in bytes; a power of two.
            prefault: fill this process's page tables now.
            checksums: whether puts of this process store a checksum.
            lock_timeout_s: longest wait for the index.

        Raises:
            StoreError: the file exists, or the memory is not there.
        """
        geometry = Geometry(align_up(capacity_bytes, alignment), slots, owners, alignment)
        make_file(Path(path), geometry)
        try:
            return cls(Path(path), prefault=prefault, checksums=checksums, lock_timeout_s=lock_timeout_s)
        except BaseException:
            cls.unlink(path)
            raise

    @classmethod
    def attach(
        cls,
        path: str | os.PathLike[str],
        *,
        prefault: bool = True,
        checksums: bool = True,
        lock_timeout_s: float = LOCK_TIMEOUT_S,
    ) -> Self:
        """Opens an arena that somebody created. Arguments as in `create`.

        Raises:
            StoreError: there is no such arena.
        """
        return cls(Path(path), prefault=prefault, checksums=checksums, lock_timeout_s=lock_timeout_s)

    @staticmethod
    def unlink(path: str | os.PathLike[str]) -> None:
        """Removes the file, if it is there. Processes that have it open keep their mapping."""
        Path(path).unlink(missing_ok=True)

    def put(self, key: str, data: Buffer, *, shape: Sequence[int], dtype: str) -> bool:
        """Stores a copy of `data` (contiguous, any element type). See `FeatureStore.put`."""
        source = as_bytes(data, "data")
        record = Record.of(Name.of(key), shape, dtype, source.nbytes)
        with self._lock:
            self._give_back_overdue()
            slot = self._index.reserve(record, self._row())
            if not slot:
                return False
            self._writing += 1
            offset = self._words[self._table + slot * SLOT_WORDS + S_OFFSET]
            target = self.memory()[offset : offset + record.nbytes]
        try:
            digest = None
            if self._checksums:
                digest = copy_with_checksum(target, source)
            else:
                copy(target, source)
            with self._lock:
                self._index.commit(slot, digest)
                self._writing -= 1
                self._words[H_PUTS] += 1
        except BaseException:
            self._orphans.append(slot)
            self._writing -= 1
            raise
        return True

    def reserve(self, key: str, nbytes: int) -> Reservation | None:
        """Room for a feature that something else will write, or None when it is there or being written.

        As with `put`, it is readable only when it is committed, and the room of a process that dies is taken back.

        Raises:
            StoreFullError: no room without evicting leased features.
            StoreError: no bytes, a key beyond the limits, or the arena does not answer.
        """
        record = Record.of(Name.of(key), (), "", nbytes)
        with self._lock:
            self._give_back_overdue()
            slot = self._index.reserve(record, self._row())
            if not slot:
                return None
            self._writing += 1
            offset = self._words[self._table + slot * SLOT_WORDS + S_OFFSET]
            return Reservation(self, self._incarnation, slot, offset, key, self.memory()[offset : offset + nbytes])

    def contains(self, key: str) -> bool:
        """See `FeatureStore.contains`."""
        name = Name.of(key)
        with self._lock:
            return self._index.find_ready(name) != 0

    def lease(self, key: str, *, verify: bool = True) -> Lease | None:
        """Pins a feature. See `FeatureStore.lease`."""
        name = Name.of(key)
        with self._lock:
            self._give_back_overdue()
            slot = self._index.find_ready(name)
            if not slot:
                self._words[H_MISSES] += 1
                return None
            self._words[H_HITS] += 1
            self._index.pin(slot, self._row())
            meta = self._index.slots.meta(slot, key)
            offset = self._words[self._table + slot * SLOT_WORDS + S_OFFSET]
            lease = Lease(self, self._incarnation, slot, offset, meta)
            stored = self.memory()[offset : offset + meta.nbytes]
        if verify and meta.checksum is not None:
            try:
                actual = checksum(stored)
            except BaseException:
                self._take_back(lease, corrupt=False)
                raise
            if actual != meta.checksum:
                self._take_back(lease, corrupt=True)
                raise CorruptFeatureError(f"{key}: checksum {actual:016x}, stored with {meta.checksum:016x}")
        return lease

    def get_into(self, key: str, dest: Buffer, *, verify: bool = True) -> FeatureMeta | None:
        """Copies a feature out. See `FeatureStore.get_into`."""
        target = as_bytes(dest, "dest")
        if not target.flags.writeable:
            raise StoreError("dest is read-only")
        lease = self.lease(key, verify=verify)
        if lease is None:
            return None
        with lease:
            if target.nbytes < lease.nbytes:
                raise StoreError(f"dest of {target.nbytes} bytes for a feature of {lease.nbytes}")
            stored = self.memory()[lease.offset : lease.offset + lease.nbytes]
            copy(target[: lease.nbytes], stored)
            if lease._incarnation is not self._incarnation:
                raise StoreError("arena: closed during the copy")
            return lease.meta

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Bytes of a feature that *this* process leases (`Lease.offset`, `Lease.nbytes`), read-only and uncopied.

        Raises:
            StoreError: no such place, or the arena is closed.
        """
        if offset < 0 or nbytes < 0 or offset + nbytes > len(self._features):
            raise StoreError(f"arena: no {nbytes} bytes at {offset}")
        return self._features[offset : offset + nbytes].toreadonly()

    def copy_pinned(self, key: str, slot: int, offset: int, dest: Buffer) -> None:
        """Fills `dest` with a feature that *another* process leases (`Lease.slot`, `Lease.offset`), without the lock.

        Whether it is leased is looked up before and after: whoever leased it may die meanwhile, and its room be taken.

        Raises:
            StoreError: no such place, nobody leases the feature there (any more), or the arena is closed.
        """
        target, digest = as_bytes(dest, "dest"), Name.of(key).digest
        stored = as_bytes(self.view(offset, target.nbytes), key)
        leased_before = self._index.is_pinned(slot, digest, offset, target.nbytes)
        if leased_before:
            copy(target, stored)
        if not (leased_before and self._index.is_pinned(slot, digest, offset, target.nbytes)):
            raise StoreError(f"{key}: nobody leases it at {offset} (any more)")

    def memory(self) -> Bytes:
        """All room for features, writable, for a transport to register. While it is referenced it stays mapped.

        A lease's bytes start at its `offset` here.
        """
        return as_bytes(self._features, "the arena")

    def remove(self, key: str) -> bool:
        """Makes a feature missing. See `FeatureStore.remove`."""
        name = Name.of(key)
        with self._lock:
            slot = self._index.find_ready(name)
            return slot != 0 and self._index.drop(slot)

    def stats(self) -> StoreStats:
        """Counters of all processes together."""
        with self._lock:
            return self._index.stats()

    def entries(self) -> list[FeatureEntry]:
        """Every readable feature, the least recently used first."""
        with self._lock:
            return self._index.entries()

    def close(self) -> None:
        """Ends all leases of this process and unmaps, as soon as no view is left. Any number of calls.

        Where the lock is not had in time nothing is given back, until another call or the end of this process.
        """
        if self not in _open_arenas:
            return
        try:
            with self._lock:
                self._leave()
        except StoreError as error:  # raised, it would keep whoever shuts down from closing the rest
            logger.warning("%s stays open until this process ends: %s", self.path, error)

    def _leave(self) -> None:
        """Locked."""
        if self._owner is not None:
            self._give_back_overdue()
            self._index.leave(self._owner)
            if not self._writing:  # else another thread still writes there: ours until this process ends
                self._index.owners.give_back(self._owner)
        self._index.owners.close()
        self._lock.close()
        self._begin_incarnation()
        self._features = memoryview(b"")
        del self._index, self._words
        _open_arenas.discard(self)

    def _give_back_overdue(self) -> None:
        """Locked."""
        while self._orphans:
            self._index.discard(self._orphans.pop())
        while self._unhanded:
            self._end(*self._unhanded.pop())

    def _row(self) -> int:
        """Our owner row. Locked."""
        if self._owner is None:
            owners = self._index.owners
            self._owner = owners.claim()
            if self._owner is None:
                self._index.reap()
                self._owner = owners.claim()
            if self._owner is None:
                raise StoreError(f"arena {self.path}: too many processes")
        return self._owner

    def _release(self, lease: Lease) -> None:
        if lease._incarnation is not self._incarnation:  # closed, or a fork since: the pin is not ours any more
            lease._released = True
            return
        with self._lock:
            if not lease._released and lease._incarnation is self._incarnation:
                self._index.unpin(lease.slot, self._row())
            lease._released = True

    def _commit(self, reservation: Reservation, meta: FeatureMeta) -> Lease:
        if meta.key != reservation.key or meta.nbytes != reservation.nbytes:
            raise StoreError(
                f"room for {reservation.nbytes} bytes of {reservation.key}, not for {meta.nbytes} of {meta.key}"
            )
        record = Record.of(Name.of(meta.key), meta.shape, meta.dtype, meta.nbytes)
        with self._lock:
            if reservation._incarnation is not self._incarnation or reservation._ended or reservation._detached:
                raise StoreError(f"room for {reservation.key}: its reservation has ended")
            self._index.slots.describe(reservation._slot, record)
            self._index.commit(reservation._slot, meta.checksum)
            self._writing -= 1
            self._words[H_PUTS] += 1
            reservation._ended = True
            self._index.pin(reservation._slot, self._row())
            return Lease(self, self._incarnation, reservation._slot, reservation.offset, meta)

    def _abandon(self, reservation: Reservation) -> None:
        # Closed, or a fork since: reclaimed when the process that made it is gone.
        if reservation._incarnation is not self._incarnation:
            return
        if reservation._ended:
            return
        try:
            with self._lock:
                if not reservation._ended and reservation._incarnation is self._incarnation:
                    reservation._ended = True
                    self._writing -= 1
                    self._index.discard(reservation._slot)
        except StoreError:  # the lock was not to be had: whoever abandons does so once
            if not reservation._ended and reservation._incarnation is self._incarnation:
                reservation._ended = True
                self._writing -= 1
                self._orphans.append(reservation._slot)
            raise

    def _detach(self, reservation: Reservation) -> None:
        with self._lock:
            if not reservation._ended and not reservation._detached and reservation._incarnation is self._incarnation:
                self._index.slots.disown(reservation._slot)
                reservation._detached = True

    def _take_back(self, lease: Lease, *, corrupt: bool) -> None:
        """Ends a pin that its caller will not get; where the lock is not had in time, the next put or lease does."""
        try:
            with self._lock:
                self._end(lease, corrupt)
        except StoreError:
            self._unhanded.append((lease, corrupt))

    def _end(self, lease: Lease, corrupt: bool) -> None:
        """Locked."""
        if lease._incarnation is not self._incarnation:
            return
        if corrupt and self._index.drop(lease.slot):
            self._words[H_CORRUPT] += 1
        self._index.unpin(lease.slot, self._row())
        lease._released = True


if TYPE_CHECKING:
    _is_a_tier: type[FeatureStore] = Arena

_open_arenas: weakref.WeakSet[Arena] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for arena in list(_open_arenas):
        arena._lock.reopen_after_fork()
        arena._index.owners.reopen_after_fork()
        arena._begin_incarnation()


os.register_at_fork(after_in_child=_after_fork_in_child)
