"""The slot table of an arena: which features there are, where they lie, who leases them. Callers hold the arena's lock.

A slot is free, allocated, ready or dropped; nothing else is written down but where it lies, when it was used last, and
how many leases each process has on it. What follows from these (free room, who is to be evicted, totals) is worked out
when it is asked for, over the slots that were ever used. So every change is whole after each single store, a process
may die between any two of them, and there is nothing to repair.

Tenants have equal shares of the room; what one leaves, the others have, so one alone has all of it. When room is
needed, whoever holds more than its share gives first. Shares are worked out then, too, and need no configuration:
whoever holds something counts. They are shares of what lies idle: it gives way to what is in use, whoever's that is, so
that no put has to wait for shares, and nobody for such a put (`docs/waiting.md`).

Lookups need no numpy: whoever only asks what there is does without its 13 MiB.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from store.arena.file import (
    ALIGNMENT,
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
from store.keys import TENANTS

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

FREE = 0
ALLOCATED = 1  # room taken, being written, not readable
READY = 2
DROPPED = 3  # removed or corrupt while leased: unreadable, its room is free (`reap`) after the last lease

DIGEST_BYTES = 16

FORGOTTEN_NS = 600 * 10**9
"""What nobody has used for so long counts for no share: it goes first, whoever's it is. Else tenants that are gone
would keep theirs for ever."""


class SlotTable:
    """All that the processes of one arena share, but for the bytes.

    Attributes:
        header: words of the file (`store.arena.file`).
        state, digest, offset, nbytes, owner, tenant, tick, record: columns, a value or a stretch of bytes for each
            slot. Owner: row of its writer. Tenant: whose share it takes (`store.keys.tenant_of`). Tick: CLOCK_MONOTONIC
            ns of its last use.
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
        self.owner, self.tenant, self.tick = columns["owner"], columns["tenant"], columns["tick"]
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

    def reserve(self, digest: bytes, nbytes: int, owner: int, tenant: int) -> int | None:
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
        slot, offset = self._make_room(nbytes, tenant)
        self.digest[DIGEST_BYTES * slot : DIGEST_BYTES * (slot + 1)] = digest
        self.offset[slot], self.nbytes[slot] = offset, nbytes
        self.owner[slot], self.tenant[slot] = owner, tenant
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
        """Ends a lease; the last one makes the feature evictable, and its room free if it was dropped. Not `spared`: at
        once, though after what was used longer ago. Needs no lock but the process's: nobody else writes to its row."""
        self.tick[slot] = time.monotonic_ns() - (0 if spared else self._spare_ns)
        self.leases[owner * self._geometry.slots + slot] -= 1

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

    def reap(self) -> bool:
        """Takes back what dead processes hold, and the room of dropped features that nobody leases any more. False:
        there is neither."""
        dead = [row for row in range(self.header[H_ROWS_USED]) if not self._is_alive(row)]
        for row in dead:
            self._take_back(row)
        return self._sweep() or bool(dead)

    def _sweep(self) -> bool:
        state = self._array(self.state)
        if DROPPED not in state:
            return False
        free = (state == DROPPED) & ~self._leased()
        state[free] = FREE
        return bool(free.any())

    def _take_back(self, owner: int) -> None:
        """The half-written features and the leases of a process that is gone."""
        half = self.half_written(owner)
        self.header[H_RECLAIMED] += int(self._leases()[owner].sum()) + len(half)
        self.leave(owner)
        self._array(self.state)[half] = FREE

    def half_written(self, owner: int) -> npt.NDArray[np.int64]:
        """Slots of the features that a process is writing."""
        writing = (self._array(self.state) == ALLOCATED) & (self._array(self.owner) == owner)
        found: npt.NDArray[np.int64] = writing.nonzero()[0]
        return found

    def totals(self) -> tuple[int, int, int]:
        """The bytes that all take, readable features, and those that are leased, dropped ones included."""
        self._sweep()
        state = self._array(self.state)
        used = self._spans()[state != FREE].sum()
        return int(used), int((state == READY).sum()), int(self._leased().sum())

    def by_use(self) -> list[tuple[int, int, float]]:
        """Of every readable feature its slot, its leases, and the seconds since its last use; the oldest first."""
        leases, now = self._leases().sum(axis=0), time.monotonic_ns()
        ready = (self._array(self.state) == READY).nonzero()[0].tolist()
        return [
            (slot, int(leases[slot]), (now - self.tick[slot]) / 1e9)
            for slot in sorted(ready, key=self.tick.__getitem__)
        ]

    def _make_room(self, nbytes: int, tenant: int) -> tuple[int, int]:
        """A free slot, and the offset of room of so many bytes. What the dead hold goes first, then what was used least
        recently of whoever has to give (`_evictable_for`)."""
        span = align_up(nbytes, ALIGNMENT)
        if span > self._geometry.capacity_bytes:
            raise StoreFullError(f"feature of {nbytes} bytes in an arena of {self._geometry.capacity_bytes}")
        place = self._place(span)
        if place is None and self.reap():
            place = self._place(span)
        while place is None:
            now, tick = time.monotonic_ns(), self._array(self.tick)
            old = tick <= now - self._spare_ns
            idle = ((self._array(self.state) == READY) & ~self._leased() & old).nonzero()[0]
            if len(idle) and tick[idle].min() > now - FORGOTTEN_NS:
                idle = self._evictable_for(idle, tenant, span)
            if not len(idle):
                raise StoreFullError(f"arena: no {span} bytes free, all is leased, being written or just used")
            self.state[idle[tick[idle].argmin()]] = FREE
            self.header[H_EVICTIONS] += 1
            place = self._place(span)
        return place

    def _evictable_for(self, idle: npt.NDArray[np.int64], tenant: int, span: int) -> npt.NDArray[np.int64]:
        """Those of the idle slots that may go for room of so many bytes that a tenant asks for.

        Of the tenants that hold more than their share, this room included, the one that holds most gives. Where none of
        them has anything idle, or room is only too cut up, the tenant itself gives; if it has nothing idle either, all.
        """
        import numpy as np

        tenants, capacity = self._array(self.tenant), self._geometry.capacity_bytes
        if (tenants == tenant).all():
            return idle
        slot_bytes = capacity / self._geometry.slots  # slots run out, too: the smallest feature counts as one
        room = (self._array(self.state) != FREE) * np.maximum(self._spans(), slot_bytes)
        by_tenant = np.bincount(tenants, weights=room, minlength=TENANTS)
        by_tenant[tenant] += max(span, slot_bytes)
        share, whose = capacity / np.count_nonzero(by_tenant), tenants[idle]
        held: npt.NDArray[np.float64] = by_tenant[whose]
        gives = held == held.max() if held.max() > share else whose == tenant
        return idle[gives] if np.any(gives) else idle

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
        return (self._array(self.nbytes) + ALIGNMENT - 1) & -ALIGNMENT

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
