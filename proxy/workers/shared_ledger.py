"""A `proxy.registry.ledger.Ledger` that several proxy processes share: each counts in its own row of a board and reads
all.

A process that was killed holds nothing any more. Whoever collected it says so with `settle`, which lets its row look
as if everything acquired had been released: what it counted stays, so that sums never fall, and its successor goes on
counting in the same row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache

from proxy.registry.ledger import LifeId, OwnLedger, Tally, Work
from proxy.workers.shared_counters import Board

# Cells of one kind of work. What was released is read before what was acquired, so that nobody ever seems to hold less
# than nothing.
_RELEASED, _RELEASED_WEIGHT, _ACQUIRED, _ACQUIRED_WEIGHT = range(4)
_CELLS = 4
COUNTS = _CELLS * len(Work)
_LOOKS = 10  # a row whose tags change while it is read is read again; they change when lives begin and end
_AT = {work: _CELLS * number for number, work in enumerate(Work)}


class SharedLedger:
    """The ledger of one of several processes.

    Args:
        row: the one this process counts in, or None for one that only reads.
    """

    def __init__(self, board: Board, row: int | None) -> None:
        self._board = board
        self._row = row
        self._slots: dict[LifeId, int] = {}
        self._used: set[int] = set()
        self._known: list[tuple[int, dict[int, int]]] = [(-1, {})] * board.rows
        self._beyond = OwnLedger()  # lives for which the row has no room: only this process knows of those

    def acquire(self, life: LifeId, work: Work, weight: int) -> None:
        slot = self._own_slot(life)
        if slot is None:
            self._beyond.acquire(life, work, weight)
        else:
            assert self._row is not None, "only a process with a row has slots"
            self._add(slot, _AT[work] + _ACQUIRED, weight)
            self._board.say_moved(self._row)

    def release(self, life: LifeId, work: Work, weight: int) -> None:
        slot = self._slots.get(life)
        if slot is None:
            self._beyond.release(life, work, weight)
        else:
            self._add(slot, _AT[work] + _RELEASED, weight)

    def tallies(self, life: LifeId) -> Mapping[Work, Tally]:
        tag, sums = _tag(life), [0] * COUNTS
        for row in range(self._board.rows):
            for at, count in enumerate(self._read(row, tag)):
                sums[at] += count
        beyond = self._beyond.tallies(life)
        return {work: _tally(sums[at : at + _CELLS], beyond[work]) for work, at in _AT.items()}

    def forget(self, life: LifeId) -> None:
        self._beyond.forget(life)
        slot = self._slots.pop(life, None)
        if slot is not None:
            assert self._row is not None, "only a process with a row has slots"
            self._used.discard(slot)
            self._board.free(self._row, slot)

    def moves(self) -> int:
        """Another number after some process has acquired something: a cheap look at whether there is news."""
        return self._board.moves()

    def _add(self, slot: int, at: int, weight: int) -> None:
        assert self._row is not None, "only a process with a row has slots"
        self._board.add(self._row, slot, at + 1, weight)
        self._board.add(self._row, slot, at, 1)

    def _own_slot(self, life: LifeId) -> int | None:
        """The slot of a life in this process's row, taken if need be; None where the row has no room."""
        found = self._slots.get(life)
        if found is not None:
            return found
        assert self._row is not None, "a process without a row acquires nothing"
        if any(tally.held for tally in self._beyond.tallies(life).values()):
            return None  # it has to end where it began
        tag, tags = _tag(life), self._board.tags(self._row)
        if tag in tags:  # of the process that had this row before
            slot = tags.index(tag)
        else:
            free = (slot for slot, taken in enumerate(tags) if not taken)
            # What a former process counted of lives that are gone may go when there is no other room.
            left_behind = (slot for slot in range(len(tags)) if slot not in self._used)
            slot = next(free, next(left_behind, -1))
            if slot < 0:
                return None
            if tags[slot]:
                self._board.free(self._row, slot)
            self._board.take(self._row, slot, tag)
        self._slots[life] = slot
        self._used.add(slot)
        return slot

    def _read(self, row: int, tag: int) -> list[int]:
        """The counts under a tag in one row; none where it has no slot."""
        counts: list[int] = []
        for _ in range(_LOOKS):
            changes = self._board.changes(row)
            if self._known[row][0] != changes:
                tags = {tag: slot for slot, tag in enumerate(self._board.tags(row)) if tag}
                self._known[row] = (changes, tags)
            slot = self._known[row][1].get(tag)
            counts = [] if slot is None else self._board.read(row, slot)
            if self._board.changes(row) == changes:
                break
        return counts


def settle(board: Board, row: int) -> None:
    """Release everything that is acquired in a row whose process has ended, and forget its connections."""
    board.say_connections(row, None)
    for slot, tag in enumerate(board.tags(row)):
        if tag:
            counts = board.read(row, slot)
            for at in _AT.values():
                counts[at + _RELEASED] = counts[at + _ACQUIRED]
                counts[at + _RELEASED_WEIGHT] = counts[at + _ACQUIRED_WEIGHT]
            board.write(row, slot, counts)
    board.say_changed(row)


def _tally(cells: list[int], beyond: Tally) -> Tally:
    return Tally(
        acquired=cells[_ACQUIRED] + beyond.acquired,
        released=cells[_RELEASED] + beyond.released,
        acquired_weight=cells[_ACQUIRED_WEIGHT] + beyond.acquired_weight,
        released_weight=cells[_RELEASED_WEIGHT] + beyond.released_weight,
    )


@lru_cache(maxsize=4096)
def _tag(life: LifeId) -> int:
    digest = hashlib.blake2b("\0".join(life).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True) or 1
