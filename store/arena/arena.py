"""Tier 1 of the MM Store: one shared-memory file per host holds the features of all its processes.

Owns the order of things: room is taken and features are pinned under the arena's lock, bytes are copied and checked
outside it, and what a process gives back it gives back without it: nobody else writes to its row and its rooms.
A key names one content for ever, so nothing is ever overwritten. A feature is readable only when its bytes and checksum
are complete; a process that dies at any point leaves nothing readable that is not whole, and what it held is taken back
when room is needed.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Self

import xxhash

from store.arena.file import (
    ALIGNMENT,
    H_CAPACITY,
    H_CORRUPT,
    H_HITS,
    H_MISSES,
    H_PUTS,
    H_RECLAIMED,
    HEADER_WORDS,
    WORD,
    ArenaLocks,
    Geometry,
    align_up,
    make_file,
    map_file,
    open_anew,
    open_file,
)
from store.arena.table import SlotTable
from store.errors import CorruptFeatureError, StoreError
from store.feature import (
    Buffer,
    Bytes,
    FeatureEntry,
    FeatureMeta,
    StoreStats,
    as_bytes,
    checked_key,
    copy,
    copy_with_checksum,
    verify_payload,
)
from store.keys import tenant_of

logger = logging.getLogger(__name__)

LOCK_TIMEOUT_S = 5.0


class Lease:
    """One pin on one feature: while it lasts, in this process or its death, the feature is neither evicted nor
    overwritten. Whoever got it releases it, or leaves the `with`.

    Attributes:
        meta: the feature.
        slot, offset: where it lies, for `Arena.copy_pinned` in *another* process that has attached the same arena.
        nbytes: its size.
    """

    __slots__ = ("_arena", "_own", "_released", "_spared", "meta", "nbytes", "offset", "slot")

    def __init__(self, arena: Arena, slot: int, offset: int, meta: FeatureMeta, *, spared: bool = True) -> None:
        """For `Arena` only."""
        self._arena, self._own, self._spared = arena, arena._own, spared
        self._released = False
        self.slot = slot
        self.meta = meta
        self.offset = offset
        self.nbytes = meta.nbytes

    def view(self) -> memoryview:
        """The bytes, read-only and uncopied. Neither it nor what is made from it may be read after `release`.

        Raises:
            StoreError: the lease has ended.
        """
        if self._released:
            raise StoreError(f"lease on {self.meta.key}: already released")
        return self._arena.view(self.offset, self.nbytes)

    def release(self) -> None:
        """Ends the pin. Any number of calls, from any thread; never waits, and never fails. Does nothing in a forked
        child."""
        arena = self._arena
        with arena._own:
            if not self._released and self._own is arena._own:  # else closed, or a fork since
                arena._table.unpin(self.slot, arena._row(), spared=self._spared)
            self._released = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Reservation:
    """Room that something fills: a copy, or a fetch from another host. Ends with `commit` or `abandon`; a process that
    dies before leaves nothing readable, and the room is taken back.

    Attributes:
        key: the feature it is for.
        data: the bytes to fill, writable; they stay mapped while this is referenced.
        nbytes: their number.
        address: where they lie in this process.
    """

    def __init__(self, arena: Arena, slot: int, offset: int, key: str, data: Bytes) -> None:
        """For `Arena` only."""
        self._arena, self._own = arena, arena._own
        self._slot = slot
        self._offset = offset
        self._ended = self._detached = False
        self.key, self.data = key, data
        self.nbytes, self.address = data.nbytes, data.ctypes.data

    def commit(self, meta: FeatureMeta) -> Lease:
        """The bytes are complete: readable by all from now on, and leased by the caller.

        Raises:
            StoreError: `meta` is of another key or size, or the reservation has ended.
        """
        if meta.key != self.key or meta.nbytes != self.nbytes:
            raise StoreError(f"room for {self.nbytes} bytes of {self.key}, not for {meta.nbytes} of {meta.key}")
        with self._arena._index() as table, self._arena._own:
            if self._detached or not self._end():
                raise StoreError(f"room for {self.key}: its reservation has ended")
            table.commit(self._slot, meta)
            table.header[H_PUTS] += 1
            table.pin(self._slot, self._arena._row())
            return Lease(self._arena, self._slot, self._offset, meta)

    def abandon(self) -> None:
        """Gives the room back, as `Lease.release` does. Only when nothing writes to it any more. Any number of calls;
        none after `commit`."""
        with self._arena._own:
            if self._end():
                self._arena._table.free(self._slot)

    def detach(self) -> None:
        """Lets others store the key elsewhere, while a write that cannot be stopped may still land here.

        The room stays taken until `abandon`, and can no longer be committed.
        """
        with self._arena._index() as table, self._arena._own:
            if not self._ended and self._own is self._arena._own:
                table.disown(self._slot)
                self._detached = True

    def _end(self) -> bool:
        """Whether it had not ended yet, nor all of its arena's. Locked (`_own`)."""
        ended, self._ended = self._ended, True
        return not ended and self._own is self._arena._own


class Arena:
    """Features by key, for all processes of a host. Thread-safe; survives fork (the child holds no leases) and spawn
    (attach)."""

    def __init__(self, path: Path, *, prefault: bool, lock_timeout_s: float, spare_s: float) -> None:
        """For `create` and `attach`."""
        self.path = path
        fd, geometry = open_file(path)
        try:
            file = map_file(fd, geometry, prefault=prefault)
            own = open_anew(fd)
        finally:
            os.close(fd)
        try:
            self._lock = ArenaLocks(own, file[: HEADER_WORDS * WORD].cast("Q"))
        except BaseException:
            os.close(own)
            raise
        self._table = SlotTable(file, geometry, self._lock.is_alive, spare_s=spare_s)
        self._owners = geometry.owners
        self._lock_timeout_s = lock_timeout_s
        self._features = file[geometry.data_byte :]
        self._begin_anew()
        _open_arenas.add(self)

    def _begin_anew(self) -> None:
        """What was begun under another lock, before a fork or `close`, is over."""
        self._own = threading.Lock()  # of our counts of leases; never held for long

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        capacity_bytes: int,
        *,
        slots: int = 4096,
        owners: int = 128,
        prefault: bool = True,
    ) -> Self:
        """Makes the arena's file and attaches to it. Who creates it unlinks it.

        Args:
            path: a file that does not exist yet, under /dev/shm.
            capacity_bytes: room for features, rounded up to whole pages.
            slots: most features at one time.
            owners: most processes at one time.
            prefault: fill this process's page tables now.

        Raises:
            StoreError: the file exists, or the memory is not there.
        """
        make_file(Path(path), Geometry(align_up(capacity_bytes, ALIGNMENT), slots, owners))
        try:
            return cls.attach(path, prefault=prefault)
        except BaseException:
            cls.unlink(path)
            raise

    @classmethod
    def attach(
        cls,
        path: str | os.PathLike[str],
        *,
        prefault: bool = True,
        lock_timeout_s: float = LOCK_TIMEOUT_S,
        spare_s: float = 0.0,
    ) -> Self:
        """Opens an arena that somebody created.

        Args:
            prefault: as in `create`.
            lock_timeout_s: longest wait for the index.
            spare_s: what was stored or used in the last so many seconds is not evicted by this process.

        Raises:
            StoreError: there is no such arena.
        """
        return cls(Path(path), prefault=prefault, lock_timeout_s=lock_timeout_s, spare_s=spare_s)

    @staticmethod
    def unlink(path: str | os.PathLike[str]) -> None:
        """Removes the file, if it is there. Processes that have it open keep their mapping."""
        Path(path).unlink(missing_ok=True)

    def put(self, key: str, data: Buffer, *, shape: Sequence[int], dtype: str) -> bool:
        """Stores a copy of `data` (contiguous, any element type). True: stored and readable by all. False: it is there,
        or somebody is writing it.

        Raises:
            StoreFullError: no room without evicting leased features.
            StoreError: empty data, a key or shape beyond the limits, or the arena does not answer.
        """
        source = as_bytes(data, "data")
        meta = FeatureMeta(key, tuple(shape), dtype, source.nbytes)
        room = self.reserve(key, source.nbytes)
        if room is None:
            return False
        try:
            room.commit(replace(meta, checksum=copy_with_checksum(room.data, source))).release()
        except BaseException:
            room.abandon()
            raise
        return True

    def reserve(self, key: str, nbytes: int) -> Reservation | None:
        """Room for a feature that something else will write, or None when it is there or being written.

        As with `put`, it is readable only when it is committed, and the room of a process that dies is taken back.

        Raises:
            StoreFullError: no room without evicting leased features.
            StoreError: no bytes, a key beyond the limits, or the arena does not answer.
        """
        name = _digest(FeatureMeta(key, (), "", nbytes).key)
        with self._index() as table:
            slot = table.reserve(name, nbytes, self._row(), tenant_of(key))
            if slot is None:
                return None
            offset = table.offset[slot]
            return Reservation(self, slot, offset, key, self.memory()[offset : offset + nbytes])

    def contains(self, key: str) -> bool:
        """Is the feature readable now? A hint: only a lease keeps it."""
        name = _digest(key)
        with self._index() as table:
            return table.find_ready(name) is not None

    def lease(self, key: str, *, verify: bool = True) -> Lease | None:
        """Pins the feature and checks its checksum; None when it is missing.

        Raises:
            CorruptFeatureError: the checksum does not match; the feature is dropped.
            StoreError: the arena does not answer.
        """
        found = self.lease_all([key])
        if found is None:
            return None
        (lease,) = found
        lease._spared = True  # it was looked at, and will be needed
        if verify:
            try:
                self.verify(lease)
            except BaseException:
                lease.release()
                raise
        return lease

    def verify(self, lease: Lease) -> None:
        """Checks the checksum of what was leased without.

        Raises:
            CorruptFeatureError: it does not match; the feature is dropped, and goes with its last lease.
            StoreError: the lease has ended.
        """
        try:
            verify_payload(lease.meta, as_bytes(lease.view(), lease.meta.key))
        except CorruptFeatureError:  # leased by us it stays where it is: no lock is needed
            self._table.header[H_CORRUPT] += self._table.drop(lease.slot)
            raise

    def lease_all(self, keys: Collection[str], *, timeout_s: float | None = None) -> list[Lease] | None:
        """Pins all of these features, or none where one of them is missing. Their checksums are not looked at. When the
        leases end they have served: they are not spared (`attach`) any more, or room would come back at the pace of
        that time, not of those who use them. `timeout_s`: longest wait for the index, if not the arena's.

        Raises:
            StoreError: the arena does not answer.
        """
        names = [(key, _digest(key)) for key in keys]
        with self._index(timeout_s) as table:
            slots = [(key, slot) for key, name in names if (slot := table.find_ready(name)) is not None]
            if len(slots) < len(names):
                table.header[H_MISSES] += 1
                return None
            table.header[H_HITS] += len(slots)
            with self._own:
                for _, slot in slots:
                    table.pin(slot, self._row())
            return [Lease(self, slot, table.offset[slot], table.meta(slot, key), spared=False) for key, slot in slots]

    def touch(self, keys: Iterable[str]) -> None:
        """Counts as a use of those of these features that are there: they are evicted last.

        Raises:
            StoreError: the arena does not answer.
        """
        names = [_digest(key) for key in keys]
        with self._index() as table:
            for name in names:
                if (slot := table.find_ready(name)) is not None:
                    table.touch(slot)

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
        target, name = as_bytes(dest, "dest"), _digest(key)
        stored = as_bytes(self.view(offset, target.nbytes), key)
        leased_before = self._table.is_leased_at(slot, name, offset, target.nbytes)
        if leased_before:
            copy(target, stored)
        if not (leased_before and self._table.is_leased_at(slot, name, offset, target.nbytes)):
            raise StoreError(f"{key}: nobody leases it at {offset} (any more)")

    def memory(self) -> Bytes:
        """All room for features, writable, for a transport to register. While it is referenced it stays mapped.

        A lease's bytes start at its `offset` here.
        """
        return as_bytes(self._features, "the arena")

    def remove(self, key: str) -> bool:
        """Makes the feature missing; its space returns with the last lease. False when it was not readable."""
        name = _digest(key)
        with self._index() as table:
            slot = table.find_ready(name)
            return slot is not None and table.drop(slot)

    def stats(self) -> StoreStats:
        """Counters of all processes together."""
        with self._index() as table:
            return StoreStats(table.header[H_CAPACITY], *table.totals(), *table.header[H_PUTS : H_RECLAIMED + 1])

    def entries(self) -> list[FeatureEntry]:
        """Every readable feature, the least recently used first."""
        with self._index() as table:
            return [FeatureEntry(table.meta(slot), leases, age_s) for slot, leases, age_s in table.by_use()]

    def close(self) -> None:
        """Ends all leases of this process and unmaps, as soon as no view is left. Any number of calls.

        Where the lock is not had in time nothing is given back, until another call or the end of this process. Where a
        thread or a transfer still writes, that room stays taken, and the arena open, until this process ends.
        """
        if self not in _open_arenas:
            return
        try:
            with self._index() as table, self._own:
                self._begin_anew()
                if (row := self._lock.row) is not None:
                    table.leave(row)
                    if len(table.half_written(row)):
                        return
                self._lock.close()
                self._features = memoryview(b"")
                del self._table
                _open_arenas.discard(self)
        except StoreError as error:  # raised, it would keep whoever shuts down from closing the rest
            logger.warning("%s stays open until this process ends: %s", self.path, error)

    def _row(self) -> int:
        """Our owner row, taken with the first room or lease. Locked."""
        if self._lock.row is None:
            row = self._lock.claim_row(self._owners)
            if row is None:
                raise StoreError(f"arena {self.path}: too many processes")
            self._table.take_over(row)
            return row
        return self._lock.row

    @contextmanager
    def _index(self, timeout_s: float | None = None) -> Iterator[SlotTable]:
        """The table, locked. Raises StoreError where the lock is not had in time, or the arena is closed."""
        self._lock.acquire(self._lock_timeout_s if timeout_s is None else timeout_s)
        try:
            yield self._table
        finally:
            self._lock.release()


def _digest(key: str) -> bytes:
    """A key as the table compares it."""
    return xxhash.xxh3_128_digest(checked_key(key))


_open_arenas: set[Arena] = set()


def _after_fork_in_child() -> None:
    for arena in _open_arenas:
        arena._lock.reopen_after_fork()
        arena._begin_anew()


os.register_at_fork(after_in_child=_after_fork_in_child)
