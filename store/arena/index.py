"""The life of a feature in an arena: allocated, ready, leased, dropped, evicted, reclaimed. Callers hold the lock.

Knows no files, no locks and no feature bytes. Every change leaves the truth (`store.arena.layout`) whole after each
single store; `rebuild` derives the rest from it again.
"""

from __future__ import annotations

import time

from store.arena.layout import (
    ALLOCATED,
    DROPPED,
    FREE,
    H_CAPACITY,
    H_CORRUPT,
    H_EVICTIONS,
    H_FEATURES,
    H_HITS,
    H_LEASED,
    H_MISSES,
    H_PUTS,
    H_REAPED_NS,
    H_RECLAIMED,
    H_TICK,
    H_USED,
    READY,
    S_CHECKED,
    S_CHECKSUM,
    S_HASH,
    S_NBYTES,
    S_OFFSET,
    S_OWNER,
    S_PINS,
    S_STATE,
    S_TICK,
    S_USE_NEXT,
    S_USE_PREV,
    SLOT_WORDS,
    Geometry,
    align_up,
)
from store.arena.owners import OwnerTable
from store.arena.rings import Ring, Space
from store.arena.slots import Name, Record, SlotTable
from store.errors import StoreFullError
from store.feature import FeatureEntry, StoreStats

_REAP_EVERY_NS = 1_000_000_000  # looking for the dead costs a system call per owner; before StoreFullError we always do


class FeatureIndex:
    """All that the processes of one arena share, but for the bytes."""

    def __init__(
        self, file: memoryview, words: memoryview, leases: memoryview, geometry: Geometry, owners: OwnerTable
    ) -> None:
        self._words = words
        self._leases = leases  # [owners * (slots + 1)]
        self._geometry = geometry
        self._table = geometry.slots_word
        self._row_length = geometry.slots + 1
        self._space = Space(words, geometry)
        self._idle = Ring(words, geometry, S_USE_PREV, S_USE_NEXT)  # READY and not leased, least recently used first
        self.slots = SlotTable(file, words, geometry)
        self.owners = owners

    def find_ready(self, name: Name) -> int:
        """The slot of a readable feature, or 0."""
        slot = self.slots.find(name)
        return slot if slot and self._words[self._table + slot * SLOT_WORDS + S_STATE] == READY else 0

    def reserve(self, record: Record, owner: int) -> int:
        """Takes a slot and room for a new feature, evicting as needed; 0 when it is there or being written.

        Raises:
            StoreFullError: everything evictable is evicted and it still does not fit.
        """
        words = self._words
        slot = self.slots.find(record.name)
        if slot:
            at = self._table + slot * SLOT_WORDS
            if words[at + S_STATE] == READY:
                self._touch(slot)
                return 0
            if words[at + S_OWNER] == owner or self.owners.is_alive(words[at + S_OWNER]):
                return 0
            self._reclaim(slot)
        span = align_up(record.nbytes, self._geometry.alignment)
        if span > self._geometry.capacity_bytes:
            raise StoreFullError(f"feature of {record.nbytes} bytes in an arena of {self._geometry.capacity_bytes}")
        slot, before = self._make_room(span)
        self._space.take(slot, before, span)
        self.slots.fill(slot, record, owner)
        return slot

    def commit(self, slot: int, checksum: int | None) -> None:
        """The bytes are complete: the feature becomes readable."""
        words, at = self._words, self._table + slot * SLOT_WORDS
        if checksum is not None:
            words[at + S_CHECKSUM] = checksum
            words[at + S_CHECKED] = 1
        words[at + S_TICK] = self._tick()
        words[at + S_STATE] = READY
        words[H_FEATURES] += 1
        self._idle.append(slot)

    def discard(self, slot: int) -> None:
        """Frees a slot whose writer gave up."""
        self.slots.unlink(slot)
        self._free(slot)

    def pin(self, slot: int, owner: int) -> None:
        words, at = self._words, self._table + slot * SLOT_WORDS
        self._leases[owner * self._row_length + slot] += 1
        if words[at + S_PINS] == 0:
            self._idle.take_out(slot)
            words[H_LEASED] += 1
        words[at + S_PINS] += 1

    def is_pinned(self, slot: int, digest: int, offset: int, nbytes: int) -> bool:
        """Whether a readable feature of this name and size is leased there. Needs no lock: single words are read."""
        words, at = self._words, self._table + slot * SLOT_WORDS
        return (
            0 < slot < self._row_length
            and words[at + S_STATE] in (READY, DROPPED)
            and words[at + S_PINS] > 0
            and (words[at + S_HASH], words[at + S_OFFSET], words[at + S_NBYTES]) == (digest, offset, nbytes)
        )

    def unpin(self, slot: int, owner: int, count: int = 1) -> None:
        """Ends `count` leases; the last one makes the feature evictable, or frees it if it was dropped."""
        words, at = self._words, self._table + slot * SLOT_WORDS
        self._leases[owner * self._row_length + slot] -= count
        words[at + S_PINS] -= count
        if words[at + S_PINS]:
            return
        words[H_LEASED] -= 1
        if words[at + S_STATE] == READY:
            words[at + S_TICK] = self._tick()
            self._idle.append(slot)
        else:
            self._free(slot)

    def drop(self, slot: int) -> bool:
        """Makes a feature missing at once; its space returns with the last lease. False when it already was."""
        words, at = self._words, self._table + slot * SLOT_WORDS
        if words[at + S_STATE] != READY:
            return False
        words[at + S_STATE] = DROPPED
        self.slots.unlink(slot)
        words[H_FEATURES] -= 1
        if words[at + S_PINS] == 0:
            self._idle.take_out(slot)
            self._free(slot)
        return True

    def entries(self) -> list[FeatureEntry]:
        """Readable features by last use, the oldest first."""
        words, table, now = self._words, self._table, self._tick()
        slots = (
            slot for slot in range(1, self._geometry.slots + 1) if words[table + slot * SLOT_WORDS + S_STATE] == READY
        )
        used = sorted((words[table + slot * SLOT_WORDS + S_TICK], slot) for slot in slots)
        return [
            FeatureEntry(
                meta=self.slots.meta(slot, self.slots.key(slot)),
                leases=words[table + slot * SLOT_WORDS + S_PINS],
                age_s=(now - tick) / 1e9,
            )
            for tick, slot in used
        ]

    def stats(self) -> StoreStats:
        """The counters of all processes together."""
        words = self._words
        return StoreStats(
            capacity_bytes=words[H_CAPACITY],
            used_bytes=words[H_USED],
            features=words[H_FEATURES],
            leased=words[H_LEASED],
            puts=words[H_PUTS],
            hits=words[H_HITS],
            misses=words[H_MISSES],
            evictions=words[H_EVICTIONS],
            corrupt=words[H_CORRUPT],
            reclaimed=words[H_RECLAIMED],
        )

    def leave(self, owner: int) -> None:
        """Ends every lease of one process."""
        start = owner * self._row_length
        row = self._leases[start : start + self._row_length].tolist()
        for slot, count in enumerate(row):
            if count:
                self.unpin(slot, owner, count)

    def reap(self) -> None:
        """Takes back what dead processes hold: half-written features, leases, their owner rows."""
        words = self._words
        words[H_REAPED_NS] = time.monotonic_ns()
        for owner in self.owners.dead():
            words[H_RECLAIMED] += sum(self._leases[owner * self._row_length : (owner + 1) * self._row_length].tolist())
            self.leave(owner)
            for slot in range(1, self._geometry.slots + 1):
                at = self._table + slot * SLOT_WORDS
                if words[at + S_STATE] == ALLOCATED and words[at + S_OWNER] == owner:
                    self._reclaim(slot)
            self.owners.give_back(owner)

    def _make_room(self, span: int) -> tuple[int, int]:
        """A free slot, and the slot behind which there is a gap of `span` bytes."""
        words = self._words
        slot = self.slots.free_slot()
        before = self._space.find(span) if slot else None
        if before is None and time.monotonic_ns() - words[H_REAPED_NS] > _REAP_EVERY_NS:
            self.reap()
            slot = self.slots.free_slot()
            before = self._space.find(span) if slot else None
        certain = False
        while before is None:
            victim = self._idle.first()
            if victim:
                before = self._evict(victim)
                slot = self.slots.free_slot()
                if self._space.gap_after(before) < span:
                    self._space.offer(before)
                    before = self._space.find(span)
            elif certain:
                raise StoreFullError(f"arena: no {span} bytes free, and all features are leased or being written")
            else:
                certain = True
                self.reap()
                slot = self.slots.free_slot()
                before = self._space.find(span) if slot else None
        return slot, before

    def _evict(self, slot: int) -> int:
        """Drops an idle feature; returns the slot before the gap, not yet offered."""
        words = self._words
        words[self._table + slot * SLOT_WORDS + S_STATE] = FREE
        words[H_FEATURES] -= 1
        words[H_EVICTIONS] += 1
        self._idle.take_out(slot)
        self.slots.unlink(slot)
        before = self._space.give_back(slot)
        self.slots.free(slot)
        return before

    def _reclaim(self, slot: int) -> None:
        self._words[H_RECLAIMED] += 1
        self.discard(slot)

    def _free(self, slot: int) -> None:
        self._words[self._table + slot * SLOT_WORDS + S_STATE] = FREE
        self._space.offer(self._space.give_back(slot))
        self.slots.free(slot)

    def _tick(self) -> int:
        """CLOCK_MONOTONIC in ns, the same for all processes of a host; never twice the same."""
        words = self._words
        words[H_TICK] = now = max(words[H_TICK] + 1, time.monotonic_ns())
        return now

    def _touch(self, slot: int) -> None:
        words, at = self._words, self._table + slot * SLOT_WORDS
        words[at + S_TICK] = self._tick()
        if words[at + S_PINS] == 0:
            self._idle.take_out(slot)
            self._idle.append(slot)

    def rebuild(self) -> None:
        """Derives buckets, rings, free list and totals from the truth: at creation, and after a death in between."""
        words, table = self._words, self._table
        pins = [sum(self._leases[slot :: self._row_length]) for slot in range(self._row_length)]
        self.slots.clear()
        taken: list[int] = []
        idle: list[int] = []
        words[H_FEATURES] = words[H_LEASED] = 0
        for slot in range(self._geometry.slots, 0, -1):
            at = table + slot * SLOT_WORDS
            words[at + S_PINS] = pins[slot]
            state = words[at + S_STATE]
            if state == FREE or (state == DROPPED and not pins[slot]):
                self.slots.free(slot)
                continue
            taken.append(slot)
            words[H_LEASED] += pins[slot] > 0
            if state != DROPPED:
                self.slots.link(slot)
            if state == READY:
                words[H_FEATURES] += 1
                if not pins[slot]:
                    idle.append(slot)
        self._space.rebuild(taken)
        self._idle.rebuild(sorted(idle, key=lambda slot: int(words[table + slot * SLOT_WORDS + S_TICK])))
