"""Counters that several processes share, in one piece of shared memory. Pure layout over a buffer.

One row per process, and only that process writes there, so nothing is locked:

    cell 0      what is asked of all         row r, first      what its process says of itself: `Cell`
                                             then SLOTS × COUNTS    counts of each slot

What is asked is written by the parent alone. It stands here, and is no message, so that a process that starts late, or
whose parent does not answer, knows of it all the same. What a slot stands for the parent says (`roster.py`).

A cell is an aligned 64-bit integer and is written in one store, so a writer that is killed leaves the old or the new
value and never half of one, whatever the processor's memory order. Cells belong together nowhere: a count only grows,
and a reader takes each for itself.

The ledger in them: which slot an incarnation is counted in, the parent says to all (`place`). A process that was killed
holds nothing any more. Whoever collected it says so with `settle`, before another one gets the row, and lets it look as
if everything acquired had been released: what was counted stays, so that sums never fall, and the successor goes on
counting there.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Mapping, Sequence
from enum import IntEnum
from operator import add

from epd_serve.errors import ConfigError
from epd_serve.instances import IncarnationId
from proxy.registry.instance_state import NO_TALLY, NOTHING, Ledger, Tally, Work

SLOTS = 2048
"""Incarnations of instances that are counted at a time; a deployment has dozens."""

CELL_BYTES = 8
_HEADER = 1


class Asked(IntEnum):
    """What all processes are to do; each includes those before it."""

    SERVE = 0
    LEAVE = 1  # be ready no more, and go on serving
    DRAIN = 2  # take on nothing more


class Cell(IntEnum):
    """What the process of a row says of itself."""

    TAKES = 0  # its connections, and 1 more; 0: it takes none
    REQUESTS = 1  # that it has
    ROSTER = 2  # number of the one that it goes by (`roster.py`); 0: of none yet
    OBEYED = 3  # what of `Asked` it does
    TEXTS = 4  # requests of this kind that have come since it began
    MEDIA = 5


_ROW_HEADER = len(Cell)


class SharedCounters:
    """Counters over `buffer`, of `size_bytes(rows, counts)` bytes, zeros at first.

    Args:
        counts: how many counts a slot has.
    """

    def __init__(self, buffer: memoryview | mmap.mmap, rows: int, counts: int, *, slots: int = SLOTS) -> None:
        self.rows = rows
        self.counts = counts
        self.slots = slots
        self._nothing = [0] * counts
        self._cells = memoryview(buffer).cast("B").cast("q")
        row_cells = _ROW_HEADER + slots * counts
        self._starts = [_HEADER + row * row_cells for row in range(rows)]
        if len(self._cells) * CELL_BYTES != self.size_bytes(rows, counts, slots=slots):
            raise ConfigError(f"these are no counters of {rows} rows and {slots} slots: {len(self._cells)} cells")

    @staticmethod
    def size_bytes(rows: int, counts: int, *, slots: int = SLOTS) -> int:
        return CELL_BYTES * (_HEADER + rows * (_ROW_HEADER + slots * counts))

    def ask(self, asked: Asked) -> None:
        """There is no way back: who asks for less than what was asked for asks for nothing."""
        self._cells[0] = max(asked, self._cells[0])

    @property
    def asked(self) -> Asked:
        return Asked(self._cells[0])

    def say(self, row: int, cell: Cell, value: int) -> None:
        self._cells[self._starts[row] + cell] = value

    def said(self, row: int, cell: Cell) -> int:
        return self._cells[self._starts[row] + cell]

    def total(self, cell: Cell) -> int:
        """Of all processes."""
        return sum(self._cells[start + cell] for start in self._starts)

    def least_connections(self, but: int) -> int | None:
        """Returns the fewest that any process takes but that of row `but`; None without others."""
        others = (self.said(row, Cell.TAKES) for row in range(self.rows) if row != but)
        least = min(filter(None, others), default=0)
        return least - 1 if least else None

    def add(self, row: int, slot: int, count: int, value: int) -> None:
        """Only the row's own process may, and only what is not below 0."""
        self._cells[self._at(row, slot) + count] += value

    def sums(self, slot: int) -> Sequence[int]:
        """Each count of a slot, over all rows, as they are at this moment one by one."""
        cells, counts, at = self._cells, self.counts, _ROW_HEADER + slot * self.counts
        sums = self._nothing
        for start in self._starts:
            row = cells[start + at : start + at + counts].tolist()
            if row != self._nothing:
                sums = row if sums is self._nothing else [*map(add, sums, row)]
        return sums

    def copy(self, row: int, count: int, to: int) -> None:
        """Have a count be what another one is, in all slots of a row whose process has ended."""
        for slot in range(self.slots):
            at = self._at(row, slot)
            if self._cells[at + to] != self._cells[at + count]:
                self._cells[at + to] = self._cells[at + count]

    def _at(self, row: int, slot: int) -> int:
        return self._starts[row] + _ROW_HEADER + slot * self.counts


def shared_memory(size_bytes: int) -> int:
    """A descriptor of zeroed memory that other processes can inherit. It has no name, so nothing of it is left behind;
    the caller closes it.

    Raises:
        ConfigError: there is no room for it.
    """
    try:
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("epd-serve-board", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, size_bytes)
    except OSError as error:
        raise ConfigError(f"no shared memory for {size_bytes} bytes of counts: {error.strerror}") from error
    return descriptor


_ACQUIRED, _RELEASED, _ACQUIRED_WEIGHT, _RELEASED_WEIGHT = range(4)
_CELLS = 4
COUNTS = _CELLS * len(Work)
_AT = {work: _CELLS * number for number, work in enumerate(Work)}
"""The first count of each kind of work."""


class SharedLedger(Ledger):
    """That of one of several processes: it counts in its own row, and reads all.

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
        a, r, aw, rw, b, s, bw, sw, c, t, cw, tw, *_ = self._counters.sums(slot)  # of encode, prefill, decode
        return _tally((a + b + c, r + s + t, aw + bw + cw, rw + sw + tw))

    def aside(self, incarnation_id: IncarnationId, work: Work) -> Tally:
        if (slot := self._slots.get(incarnation_id)) is None:
            return NO_TALLY
        return _tally(self._counters.sums(slot)[_AT[work] : _AT[work] + _CELLS])

    def forget(self, incarnation_id: IncarnationId) -> None:
        self._slots.pop(incarnation_id, None)

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
