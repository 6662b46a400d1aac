"""A `proxy.registry.ledger.Ledger` that several proxy processes share: each counts in its own row of the shared
counters and reads all.

A process that was killed holds nothing any more. Whoever collected it says so with `settle`, before another one gets
the row, and lets it look as if everything acquired had been released: what was counted stays, so that sums never fall,
and the successor goes on counting there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from operator import add

from epd_serve.instances import IncarnationId
from proxy.registry.ledger import NO_TALLY, OwnLedger, Tally, Work
from proxy.workers.shared_counters import Asked, SharedCounters

# Cells of one kind of work. What was released is read before what was acquired, so that nobody ever seems to hold less
# than nothing.
_RELEASED, _RELEASED_WEIGHT, _ACQUIRED, _ACQUIRED_WEIGHT = range(4)
_CELLS = 4
COUNTS = _CELLS * len(Work)
_LOOKS = 10  # a row whose tags change while it is read is read again; they change when incarnations begin and end
_NOTHING = (0,) * COUNTS
_AT = {work: _CELLS * number for number, work in enumerate(Work)}


class SharedLedger:
    """The ledger of one of several processes.

    Args:
        row: the one this process counts in, or None for one that only reads.
    """

    def __init__(self, counters: SharedCounters, row: int | None) -> None:
        self._counters = counters
        self._row = row
        self._others = [other for other in range(counters.rows) if other != row]
        self._slots: dict[IncarnationId, int] = {}
        self._used: set[int] = set()
        self._known: list[tuple[int, dict[int, int]]] = [(-1, {})] * counters.rows
        self._mine = {} if row is None else _counts(counters, row)  # as the row has them: nobody else writes there
        self._still: list[tuple[int, dict[int, list[int]]]] = [(0, {})] * counters.rows
        self._beyond = OwnLedger()  # incarnations for which the row has no room: only this process knows of those

    def acquire(self, incarnation_id: IncarnationId, work: Work, weight: int) -> None:
        slot = self._own_slot(incarnation_id)
        if slot is None:
            self._beyond.acquire(incarnation_id, work, weight)
        else:
            assert self._row is not None, "only a process with a row has slots"
            self._add(incarnation_id, slot, _AT[work] + _ACQUIRED, weight)
            self._counters.say_moved(self._row)

    def release(self, incarnation_id: IncarnationId, work: Work, weight: int) -> None:
        slot = self._slots.get(incarnation_id)
        if slot is None:
            self._beyond.release(incarnation_id, work, weight)
        else:
            self._add(incarnation_id, slot, _AT[work] + _RELEASED, weight)

    def tallies(self, incarnation_id: IncarnationId) -> Mapping[Work, Tally]:
        sums, beyond = self._sums(incarnation_id), self._beyond.tallies(incarnation_id)
        return {work: _tally(sums[at : at + _CELLS], beyond[work]) for work, at in _AT.items()}

    def total(self, incarnation_id: IncarnationId) -> Tally:
        e0, e1, e2, e3, p0, p1, p2, p3, d0, d1, d2, d3 = self._sums(incarnation_id)  # cells of encode, prefill, decode
        return _tally((e0 + p0 + d0, e1 + p1 + d1, e2 + p2 + d2, e3 + p3 + d3), self._beyond.total(incarnation_id))

    def forget(self, incarnation_id: IncarnationId) -> None:
        self._beyond.forget(incarnation_id)
        slot = self._slots.pop(incarnation_id, None)
        if slot is not None:
            assert self._row is not None, "only a process with a row has slots"
            self._used.discard(slot)
            self._free(slot, _tag(incarnation_id))

    def moves(self) -> int:
        """Another number after some process has acquired something: a cheap look at whether there is news."""
        return self._counters.moves()

    def _sums(self, incarnation_id: IncarnationId) -> Sequence[int]:
        """The counts of all rows together."""
        tag = _tag(incarnation_id)
        sums: Sequence[int] = self._mine.get(tag, _NOTHING)
        for row in self._others:
            if counts := self._read(row, tag):
                sums = [*map(add, sums, counts)]
        return sums

    def _add(self, incarnation_id: IncarnationId, slot: int, at: int, weight: int) -> None:
        assert self._row is not None, "only a process with a row has slots"
        mine = self._mine[_tag(incarnation_id)]
        mine[at] += 1
        mine[at + 1] += weight
        self._counters.set(self._row, slot, at, mine[at], mine[at + 1])

    def _free(self, slot: int, tag: int) -> None:
        assert self._row is not None, "only a process with a row has slots"
        self._counters.free(self._row, slot)
        del self._mine[tag]

    def _own_slot(self, incarnation_id: IncarnationId) -> int | None:
        """The slot of an incarnation in this process's row, taken if need be; None where the row has no room."""
        slot = self._slots.get(incarnation_id)
        if slot is not None:
            return slot
        assert self._row is not None, "a process without a row acquires nothing"
        if any(tally.held for tally in self._beyond.tallies(incarnation_id).values()):
            return None  # it has to end where it began
        self._counters.say_counting(self._row, True)
        tag, tags = _tag(incarnation_id), self._counters.tags(self._row)
        if tag in tags:  # of the process that had this row before
            slot = tags.index(tag)
        else:
            free = (slot for slot, used_tag in enumerate(tags) if not used_tag)
            # What a former process counted of incarnations that are gone may go when there is no other room.
            left_behind = (slot for slot in range(len(tags)) if slot not in self._used)
            slot = next(free, next(left_behind, -1))
            if slot < 0:
                return None
            if tags[slot]:
                self._free(slot, tags[slot])
            self._counters.take(self._row, slot, tag)
            self._mine[tag] = [0] * COUNTS
        self._slots[incarnation_id] = slot
        self._used.add(slot)
        return slot

    def _read(self, row: int, tag: int) -> list[int]:
        """The counts under a tag in one row of another process; none where it has no slot."""
        if not self._counters.counting(row):
            changes = self._counters.changes(row)
            if self._still[row][0] != changes:
                self._still[row] = (changes, _counts(self._counters, row))
            return self._still[row][1].get(tag, [])
        counts: list[int] = []
        for _ in range(_LOOKS):
            changes = self._counters.changes(row)
            if self._known[row][0] != changes:
                tags = {tag: slot for slot, tag in enumerate(self._counters.tags(row)) if tag}
                self._known[row] = (changes, tags)
            slot = self._known[row][1].get(tag)
            counts = [] if slot is None else self._counters.read(row, slot)
            if self._counters.changes(row) == changes:
                break
        return counts


def settle(counters: SharedCounters, row: int) -> None:
    """Release everything that is acquired in a row whose process has ended, and forget what it said of itself."""
    counters.say_connections(row, None)
    counters.say_obeyed(row, Asked.SERVE, 0)
    counters.say_roster(row, 0)
    counters.say_counting(row, False)
    for slot, tag in enumerate(counters.tags(row)):
        if tag:
            counts = counters.read(row, slot)
            for at in _AT.values():
                counts[at + _RELEASED] = counts[at + _ACQUIRED]
                counts[at + _RELEASED_WEIGHT] = counts[at + _ACQUIRED_WEIGHT]
            counters.write(row, slot, counts)
    counters.say_changed(row)


def _counts(counters: SharedCounters, row: int) -> dict[int, list[int]]:
    """All that a row holds, by tag."""
    return {tag: counters.read(row, slot) for slot, tag in enumerate(counters.tags(row)) if tag}


def _tally(cells: Sequence[int], beyond: Tally) -> Tally:
    if beyond is NO_TALLY:
        return Tally(cells[_ACQUIRED], cells[_RELEASED], cells[_ACQUIRED_WEIGHT], cells[_RELEASED_WEIGHT])
    return Tally(
        acquired=cells[_ACQUIRED] + beyond.acquired,
        released=cells[_RELEASED] + beyond.released,
        acquired_weight=cells[_ACQUIRED_WEIGHT] + beyond.acquired_weight,
        released_weight=cells[_RELEASED_WEIGHT] + beyond.released_weight,
    )


@lru_cache(maxsize=4096)
def _tag(incarnation_id: IncarnationId) -> int:
    digest = hashlib.blake2b("\0".join(incarnation_id).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True) or 1
