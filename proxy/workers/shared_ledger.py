"""A `proxy.registry.ledger.Ledger` that several proxy processes share: each counts in its own row of the shared
counters and reads all.

Which slot an incarnation is counted in, the parent says to all (`place`). A process that was killed holds nothing any
more. Whoever collected it says so with `settle`, before another one gets the row, and lets it look as if everything
acquired had been released: what was counted stays, so that sums never fall, and the successor goes on counting there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from epd_serve.instances import IncarnationId
from proxy.registry.ledger import NO_TALLY, NOTHING, Tally, Work
from proxy.workers.shared_counters import Cell, SharedCounters

_ACQUIRED, _RELEASED, _ACQUIRED_WEIGHT, _RELEASED_WEIGHT = range(4)
_CELLS = 4
COUNTS = _CELLS * len(Work)
_AT = {work: _CELLS * number for number, work in enumerate(Work)}
"""The first count of each kind of work."""


class SharedLedger:
    """The ledger of one of several processes.

    Args:
        row: the one this process counts in, or None for one that only reads.
    """

    def __init__(self, counters: SharedCounters, row: int | None) -> None:
        self._counters = counters
        self._row = row
        self._slots: dict[IncarnationId, int] = {}

    def place(self, incarnation_id: IncarnationId, slot: int) -> None:
        """It is counted there, by all processes."""
        self._slots[incarnation_id] = slot

    def acquire(self, incarnation_id: IncarnationId, work: Work, weight: int) -> None:
        self._add(incarnation_id, _AT[work] + _ACQUIRED, weight)
        assert self._row is not None, "it has counted"
        self._counters.say_moved(self._row)

    def release(self, incarnation_id: IncarnationId, work: Work, weight: int) -> None:
        self._add(incarnation_id, _AT[work] + _RELEASED, weight)

    def tallies(self, incarnation_id: IncarnationId) -> Mapping[Work, Tally]:
        if (slot := self._slots.get(incarnation_id)) is None:
            return NOTHING
        sums = self._counters.sums(slot)
        return {work: _tally(sums[at : at + _CELLS]) for work, at in _AT.items()}

    def total(self, incarnation_id: IncarnationId) -> Tally:
        if (slot := self._slots.get(incarnation_id)) is None:
            return NO_TALLY
        a, r, aw, rw, b, s, bw, sw, c, t, cw, tw = self._counters.sums(slot)  # of encode, prefill, decode
        return _tally((a + b + c, r + s + t, aw + bw + cw, rw + sw + tw))

    def forget(self, incarnation_id: IncarnationId) -> None:
        self._slots.pop(incarnation_id, None)

    def moves(self) -> int:
        """Another number after some process has acquired something: a cheap look at whether there is news."""
        return self._counters.total(Cell.MOVES)

    def _add(self, incarnation_id: IncarnationId, count: int, weight: int) -> None:
        assert self._row is not None, "a process without a row counts nothing"
        slot = self._slots[incarnation_id]
        self._counters.add(self._row, slot, count + 2, weight)
        self._counters.add(self._row, slot, count, 1)


def settle(counters: SharedCounters, row: int) -> None:
    """Release everything that is acquired in a row whose process has ended, and forget what it said of itself."""
    for cell in (Cell.TAKES, Cell.REQUESTS, Cell.OBEYED, Cell.ROSTER):
        counters.say(row, cell, 0)
    for at in _AT.values():
        counters.copy(row, at + _ACQUIRED, at + _RELEASED)
        counters.copy(row, at + _ACQUIRED_WEIGHT, at + _RELEASED_WEIGHT)


def _tally(cells: Sequence[int]) -> Tally:
    """Cells were read one by one, while others wrote: nobody holds less than nothing."""
    acquired, released, acquired_weight, released_weight = cells
    return Tally(acquired, min(released, acquired), acquired_weight, min(released_weight, acquired_weight))
