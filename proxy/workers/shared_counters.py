"""Counters that several processes share, in one piece of shared memory. Pure layout over a buffer.

One row per process, and only that process writes there, so nothing is locked:

    cell 0      what is asked of all         row r, cells 0 to 6    requests, connections, roster … : see below
                                             then SLOTS × COUNTS    counts of each slot

What is asked is written by the parent alone. It stands here, and is no message, so that a process that starts late, or
whose parent does not answer, knows of it all the same. What a slot stands for the parent says (`roster.py`).

A cell is an aligned 64-bit integer and is written in one store, so a writer that is killed leaves the old or the new
value and never half of one, whatever the processor's memory order. Cells belong together nowhere: a count only grows,
and a reader takes each for itself.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from enum import IntEnum
from operator import add

from epd_serve.errors import ConfigError

SLOTS = 2048
"""Incarnations of instances that are counted at a time; a deployment has dozens."""

CELL_BYTES = 8
_HEADER = 1
_MOVES, _CONNECTIONS, _REQUESTS, _ROSTER, _OBEYED, _ARRIVED = range(6)
_ARRIVALS = 2  # kinds of requests
_ROW_HEADER = _ARRIVED + _ARRIVALS


class Asked(IntEnum):
    """What all processes are to do; each includes those before it."""

    SERVE = 0
    LEAVE = 1  # be ready no more, and go on serving
    DRAIN = 2  # take on nothing more


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

    def moves(self) -> int:
        """Another number after somebody has said that it moved."""
        return sum(self._cells[start + _MOVES] for start in self._starts)

    def say_moved(self, row: int) -> None:
        self._cells[self._starts[row] + _MOVES] += 1

    def say_connections(self, row: int, connections: int | None) -> None:
        """How many the row's process has; None: it takes none."""
        self._cells[self._starts[row] + _CONNECTIONS] = 0 if connections is None else connections + 1

    def connections(self, row: int) -> int | None:
        cell = self._cells[self._starts[row] + _CONNECTIONS]
        return cell - 1 if cell else None

    def least_connections(self, but: int) -> int | None:
        """Returns the fewest that any process takes but that of row `but`; None without others."""
        others = (self.connections(row) for row in range(self.rows) if row != but)
        return min((connections for connections in others if connections is not None), default=None)

    def say_obeyed(self, row: int, asked: Asked, requests: int) -> None:
        """The row's process does what is asked, and has so many requests."""
        self._cells[self._starts[row] + _REQUESTS] = requests
        self._cells[self._starts[row] + _OBEYED] = asked

    def obeyed(self, row: int) -> Asked:
        return Asked(self._cells[self._starts[row] + _OBEYED])

    def requests(self, row: int) -> int:
        return self._cells[self._starts[row] + _REQUESTS]

    @property
    def running(self) -> int:
        """Requests that all processes have."""
        return sum(map(self.requests, range(self.rows)))

    def say_arrived(self, row: int, arrived: Sequence[int]) -> None:
        """So many requests of each kind have come to the row's process since it began."""
        for at, count in enumerate(arrived):
            self._cells[self._starts[row] + _ARRIVED + at] = count

    def all_arrived(self) -> list[int]:
        """Requests of each kind that have come to all processes there are."""
        return [sum(self._cells[start + _ARRIVED + kind] for start in self._starts) for kind in range(_ARRIVALS)]

    def say_roster(self, row: int, number: int) -> None:
        """The row's process goes by this roster (`proxy/workers/roster.py`); 0: by none yet."""
        self._cells[self._starts[row] + _ROSTER] = number

    def roster(self, row: int) -> int:
        return self._cells[self._starts[row] + _ROSTER]

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
