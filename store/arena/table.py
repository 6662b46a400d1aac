"""The slot table of an arena: which features there are, where they lie, who leases them. Callers hold the arena's lock.

A slot is free, allocated, ready or dropped; nothing else is written down but where it lies, when it was used last, and
how many leases each process has on it. What follows from these (free room, who is to be evicted, totals) is worked out
when it is asked for, over the slots that were ever used. So every change is whole after each single store, a process
may die between any two of them, and there is nothing to repair.

Lookups need no numpy: whoever only asks what there is does without its 13 MiB.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from store.arena.file import (
    H_EVICTIONS,
    H_RECLAIMED,
    H_ROWS_USED,
    H_SLOTS_USED,
    HEADER_WORDS,
    WORD,
    Geometry,
    align_up,
)
from store.errors import StoreFullError
from store.feature import RECORD_BYTES, FeatureMeta, decoded, encoded

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

FREE = 0
ALLOCATED = 1  # room taken, being written, not readable
READY = 2
DROPPED = 3  # removed or corrupt while leased: unreadable, its room returns with the last lease

DIGEST_BYTES = 16


class SlotTable:
    """All that the processes of one arena share, but for the bytes.

    Attributes:
        header: words of the file (`store.arena.file`).
        state, digest, offset, nbytes, owner, tick, record: columns, a value or a stretch of bytes for each slot. Owner:
            row of its writer. Tick: CLOCK_MONOTONIC ns of its last use.
        leases: a row of counts for each process.
    """

    def __init__(
        self, file: memoryview, geometry: Geometry, is_alive: Callable[[int], bool], *, spare_s: float = 0.0
    ) -> None:
        """
        Args:
            is_alive: whether the process of an owner row lives.
            spare_s: what was used in the last so many seconds is not evicted.
        """
        self.header = file[: HEADER_WORDS * WORD].cast("Q")
        columns = {name: file[start : start + n].cast(form) for name, (start, n, form) in geometry.columns().items()}
        self.state, self.digest, self.record = columns["state"], columns["digest"], columns["record"]
        self.offset, self.nbytes = columns["offset"], columns["nbytes"]
        self.owner, self.tick = columns["owner"], columns["tick"]
        self.leases = columns["leases"]
        self._geometry = geometry
        self._is_alive = is_alive
        self._spare_ns = round(1e9 * spare_s)

    def find(self, digest: bytes) -> int | None:
        """The slot of a feature that is readable or being written."""
        names = self.digest[: DIGEST_BYTES * self.header[H_SLOTS_USED]].tobytes()
        at = names.find(digest)
        while at >= 0:
            slot, within = at // DIGEST_BYTES, at % DIGEST_BYTES
            if not within and self.state[slot] in (ALLOCATED, READY):
                return slot
            at = names.find(digest, at + 1)
        return None

    def find_ready(self, digest: bytes) -> int | None:
        """The slot of a readable feature."""
        slot = self.find(digest)
        return slot if slot is not None and self.state[slot] == READY else None

    def reserve(self, digest: bytes, nbytes: int, owner: int) -> int | None:
        """Takes a slot and room for a new feature, evicting as needed; None when it is there or being written.

        Raises:
            StoreFullError: everything evictable is evicted and it still does not fit.
        """
        slot = self.find(digest)
        if slot is not None:
            if self.state[slot] == READY:
                self.touch(slot)
                return None
            if self._is_alive(self.owner[slot]):
                return None
            self.header[H_RECLAIMED] += 1
            self.state[slot] = FREE
        slot, offset = self._make_room(nbytes)
        self.digest[DIGEST_BYTES * slot : DIGEST_BYTES * (slot + 1)] = digest
        self.offset[slot], self.nbytes[slot], self.owner[slot] = offset, nbytes, owner
        self.header[H_SLOTS_USED] = max(self.header[H_SLOTS_USED], slot + 1)
        self.state[slot] = ALLOCATED
        return slot

    def commit(self, slot: int, meta: FeatureMeta) -> None:
        """The bytes are complete: the feature becomes readable."""
        self.record[RECORD_BYTES * slot : RECORD_BYTES * (slot + 1)] = encoded(meta)
        self.tick[slot] = time.monotonic_ns()
        self.state[slot] = READY

    def disown(self, slot: int) -> None:
        """Frees the name of a slot that is still being written: another slot may take it, nobody finds this one."""
        self.digest[DIGEST_BYTES * slot : DIGEST_BYTES * (slot + 1)] = bytes(DIGEST_BYTES)

    def free(self, slot: int) -> None:
        """Frees a slot whose writer gave up."""
        self.state[slot] = FREE

    def meta(self, slot: int, key: str = "") -> FeatureMeta:
        """What was written down of a readable feature, which is of `key` where that is given."""
        return decoded(self.record[RECORD_BYTES * slot : RECORD_BYTES * (slot + 1)], key)

    def touch(self, slot: int) -> None:
        """It is used now."""
        self.tick[slot] = time.monotonic_ns()

    def pin(self, slot: int, owner: int) -> None:
        self.leases[owner * self._geometry.slots + slot] += 1

    def unpin(self, slot: int, owner: int, *, spared: bool) -> None:
        """Ends a lease; the last one makes the feature evictable, or frees it if it was dropped. Not `spared`: at once,
        though after what was used longer ago."""
        self.tick[slot] = time.monotonic_ns() - (0 if spared else self._spare_ns)
        self.leases[owner * self._geometry.slots + slot] -= 1
        if self.state[slot] == DROPPED and not self.is_leased(slot):
            self.state[slot] = FREE

    def is_leased(self, slot: int) -> bool:
        of_slot = slice(slot, self.header[H_ROWS_USED] * self._geometry.slots, self._geometry.slots)
        return any(self.leases[of_slot])

    def is_leased_at(self, slot: int, digest: bytes, offset: int, nbytes: int) -> bool:
        """Whether a readable feature of this name and size is leased there. Needs no lock: single words are read."""
        return (
            0 <= slot < self._geometry.slots
            and self.state[slot] in (READY, DROPPED)
            and self.digest[DIGEST_BYTES * slot : DIGEST_BYTES * (slot + 1)] == digest
            and (self.offset[slot], self.nbytes[slot]) == (offset, nbytes)
            and self.is_leased(slot)
        )

    def drop(self, slot: int) -> bool:
        """Makes a feature missing at once; its room returns with the last lease. False when it already was."""
        if self.state[slot] != READY:
            return False
        self.state[slot] = DROPPED if self.is_leased(slot) else FREE
        return True

    def take_over(self, owner: int) -> None:
        """A row has a new owner: what the one before it held goes back."""
        self.header[H_ROWS_USED] = max(self.header[H_ROWS_USED], owner + 1)
        self._take_back(owner)

    def leave(self, owner: int) -> None:
        """Ends every lease of one process."""
        held = self._leases()[owner].nonzero()[0]
        self._array(self.tick)[held] = time.monotonic_ns()
        self._leases()[owner, held] = 0
        state = self._array(self.state)
        state[(state == DROPPED) & ~self._leased()] = FREE

    def reap(self) -> None:
        """Takes back what dead processes hold."""
        for row in range(self.header[H_ROWS_USED]):
            if not self._is_alive(row):
                self._take_back(row)

    def _take_back(self, owner: int) -> None:
        """The half-written features and the leases of a process that is gone."""
        state = self._array(self.state)
        half = ((state == ALLOCATED) & (self._array(self.owner) == owner)).nonzero()[0]
        self.header[H_RECLAIMED] += int(self._leases()[owner].sum()) + len(half)
        self.leave(owner)
        state[half] = FREE

    def totals(self) -> dict[str, int]:
        """Readable features, those that are leased, dropped ones included, and the bytes that all take."""
        state = self._array(self.state)
        return {
            "features": int((state == READY).sum()),
            "leased": int(self._leased().sum()),
            "used_bytes": int(self._spans()[state != FREE].sum()),
        }

    def by_use(self) -> list[tuple[int, int, float]]:
        """Of every readable feature its slot, its leases, and the seconds since its last use; the oldest first."""
        leases, now = self._leases().sum(axis=0), time.monotonic_ns()
        ready = (self._array(self.state) == READY).nonzero()[0].tolist()
        return [
            (slot, int(leases[slot]), (now - self.tick[slot]) / 1e9)
            for slot in sorted(ready, key=self.tick.__getitem__)
        ]

    def _make_room(self, nbytes: int) -> tuple[int, int]:
        """A free slot, and the offset of room of so many bytes. What the dead hold goes first, then what was used least
        recently."""
        span = align_up(nbytes, self._geometry.alignment)
        if span > self._geometry.capacity_bytes:
            raise StoreFullError(f"feature of {nbytes} bytes in an arena of {self._geometry.capacity_bytes}")
        place = self._place(span)
        if place is None:
            self.reap()
            place = self._place(span)
        while place is None:
            old = self._array(self.tick) <= time.monotonic_ns() - self._spare_ns
            idle = ((self._array(self.state) == READY) & ~self._leased() & old).nonzero()[0]
            if not len(idle):
                raise StoreFullError(f"arena: no {span} bytes free, all is leased, being written or just used")
            self.state[idle[self._array(self.tick)[idle].argmin()]] = FREE
            self.header[H_EVICTIONS] += 1
            place = self._place(span)
        return place

    def _place(self, span: int) -> tuple[int, int] | None:
        """The first free slot, and the start of the first gap of `span` bytes, where there are such."""
        import numpy as np

        slot = self.state[: self.header[H_SLOTS_USED] + 1].tobytes().find(FREE)
        taken = self._array(self.state).nonzero()[0]
        if slot < 0 or self._spans()[taken].sum() + span > self._geometry.capacity_bytes:
            return None
        taken = taken[self._array(self.offset)[taken].argsort()]
        begins = self._array(self.offset)[taken]
        ends = np.concatenate(([0], begins + self._spans()[taken]))
        wide = (np.append(begins, self._geometry.capacity_bytes) - ends >= span).nonzero()[0]
        return (slot, int(ends[wide[0]])) if len(wide) else None

    # The columns as arrays, over the slots and rows that were ever used: the others are free, and hold nothing.

    def _array(self, column: memoryview) -> npt.NDArray[Any]:
        import numpy as np

        return np.frombuffer(column, dtype=column.format.lower())[: self.header[H_SLOTS_USED]]

    def _spans(self) -> npt.NDArray[np.int64]:
        """The bytes of room that each feature takes."""
        return (self._array(self.nbytes) + self._geometry.alignment - 1) & -self._geometry.alignment

    def _leases(self) -> npt.NDArray[np.uint32]:
        """[rows, slots]"""
        import numpy as np

        every = np.frombuffer(self.leases, dtype=np.uint32).reshape(-1, self._geometry.slots)
        return every[: self.header[H_ROWS_USED], : self.header[H_SLOTS_USED]]

    def _leased(self) -> npt.NDArray[np.bool_]:
        """Whether anybody leases it."""
        import numpy as np

        leased: npt.NDArray[np.bool_] = np.any(self._leases(), axis=0)
        return leased
