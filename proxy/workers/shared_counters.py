"""Counters that several processes share, in one piece of shared memory. Pure layout over a buffer.

One row per process, and only that process writes there, so nothing is locked. A row holds slots, each under a tag:

    cell 0      format of the counters       row r, cell 0          how often its tags have changed
    cell 1      rows                         cell 1                 how often something was counted up
    cell 2      slots of a row               cells 2 to 8           connections, requests, roster … : see below
    cell 3      what is asked of all         then SLOTS cells       tags; 0 is a free slot
                                             then SLOTS × COUNTS    counts of each slot

What is asked is written by the parent alone. It stands here, and is no message, so that a process that starts late, or
whose parent does not answer, knows of it all the same.

A cell is an aligned 64-bit integer and is written in one store, so a writer that is killed leaves the old or the new
value and never half of one. Counts only grow while a tag keeps its slot. A reader looks at `changes` before and after
reading a row, which tells it when a slot has been given to another tag meanwhile.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from enum import IntEnum

from epd_serve.errors import ConfigError

FORMAT = 0x45504403
SLOTS = 1024
"""Tags that one process can count under at a time: incarnations of instances, of which a deployment has dozens."""

CELL_BYTES = 8
_SHAPE = 3  # cells that say what this is
_HEADER = _SHAPE + 1
_CHANGES, _MOVES, _CONNECTIONS, _REQUESTS, _ROSTER, _OBEYED, _COUNTING, _ARRIVED = range(8)
_ARRIVALS = 2  # kinds of requests
_ROW_HEADER = _ARRIVED + _ARRIVALS


class Asked(IntEnum):
    """What all processes are to do; each includes those before it."""

    SERVE = 0
    LEAVE = 1  # be ready no more, and go on serving
    DRAIN = 2  # take on nothing more


class SharedCounters:
    """Counters over `buffer`, which is laid out at first use.

    Args:
        buffer: `size_bytes(rows, counts)` bytes of zeros, or counters of that shape.
        counts: how many counts a slot has.
    """

    def __init__(self, buffer: memoryview | mmap.mmap, rows: int, counts: int, *, slots: int = SLOTS) -> None:
        self.rows = rows
        self.counts = counts
        self.slots = slots
        self._cells = memoryview(buffer).cast("B").cast("q")
        row_cells = _ROW_HEADER + slots * (1 + counts)
        self._starts = [_HEADER + row * row_cells for row in range(rows)]
        expected = [FORMAT, rows, slots]
        stored = self._cells[:_SHAPE].tolist()
        if stored == [0, 0, 0]:
            for at, value in enumerate(expected):
                self._cells[at] = value
        elif stored != expected:
            raise ConfigError(f"these are no counters of {rows} rows and {slots} slots: {stored}")

    @staticmethod
    def size_bytes(rows: int, counts: int, *, slots: int = SLOTS) -> int:
        return CELL_BYTES * (_HEADER + rows * (_ROW_HEADER + slots * (1 + counts)))

    def ask(self, asked: Asked) -> None:
        """There is no way back: who asks for less than what was asked for asks for nothing."""
        self._cells[_SHAPE] = max(asked, self._cells[_SHAPE])

    @property
    def asked(self) -> Asked:
        return Asked(self._cells[_SHAPE])

    def changes(self, row: int) -> int:
        return self._cells[self._starts[row] + _CHANGES]

    def moves(self) -> int:
        """Another number after somebody has said that it moved."""
        return sum(self._cells[self._starts[row] + _MOVES] for row in range(self.rows))

    def say_moved(self, row: int) -> None:
        self._cells[self._starts[row] + _MOVES] += 1

    def say_connections(self, row: int, connections: int | None) -> None:
        """How many the row's process has; None: it takes none."""
        self._cells[self._starts[row] + _CONNECTIONS] = 0 if connections is None else connections + 1

    def connections(self, row: int) -> int | None:
        cell = self._cells[self._starts[row] + _CONNECTIONS]
        return cell - 1 if cell else None

    def say_obeyed(self, row: int, asked: Asked, requests: int) -> None:
        """The row's process does what is asked, and has so many requests."""
        self._cells[self._starts[row] + _REQUESTS] = requests
        self._cells[self._starts[row] + _OBEYED] = asked

    def requests(self, row: int) -> int:
        return self._cells[self._starts[row] + _REQUESTS]

    @property
    def running(self) -> int:
        """Requests that all processes have."""
        return sum(self.requests(row) for row in range(self.rows))

    def obeyed(self, row: int) -> Asked:
        return Asked(self._cells[self._starts[row] + _OBEYED])

    def say_arrived(self, row: int, arrived: Sequence[int]) -> None:
        """So many requests of each kind have come to the row's process since it began."""
        for at, count in enumerate(arrived):
            self._cells[self._starts[row] + _ARRIVED + at] = count

    def all_arrived(self) -> list[int]:
        """Requests of each kind that have come to all processes there are."""
        starts = [self._starts[row] + _ARRIVED for row in range(self.rows)]
        return [sum(self._cells[start + kind] for start in starts) for kind in range(_ARRIVALS)]

    def say_roster(self, row: int, number: int) -> None:
        """The row's process goes by this roster (`proxy/workers/roster.py`); 0: by none yet."""
        self._cells[self._starts[row] + _ROSTER] = number

    def roster(self, row: int) -> int:
        return self._cells[self._starts[row] + _ROSTER]

    def least_connections(self, but: int) -> int | None:
        """Returns the fewest that any process takes but that of row `but`; None without others."""
        others = (self.connections(row) for row in range(self.rows) if row != but)
        return min((connections for connections in others if connections is not None), default=None)

    def say_counting(self, row: int, counting: bool) -> None:
        """Whether counts of the row may change from now on."""
        self._cells[self._starts[row] + _COUNTING] = counting

    def counting(self, row: int) -> bool:
        return bool(self._cells[self._starts[row] + _COUNTING])

    def tags(self, row: int) -> list[int]:
        at = self._starts[row] + _ROW_HEADER
        return self._cells[at : at + self.slots].tolist()

    def read(self, row: int, slot: int) -> list[int]:
        """The counts of one slot, as they are at this moment one by one."""
        at = self._counts_at(row, slot)
        return self._cells[at : at + self.counts].tolist()

    def set(self, row: int, slot: int, count: int, value: int, next_value: int) -> None:
        """A count and the one behind it, which is written first. Only the row's own process may, and only to larger
        ones."""
        at = self._counts_at(row, slot) + count
        self._cells[at + 1] = next_value
        self._cells[at] = value

    def write(self, row: int, slot: int, counts: Sequence[int]) -> None:
        at = self._counts_at(row, slot)
        for count, value in enumerate(counts):
            self._cells[at + count] = value

    def take(self, row: int, slot: int, tag: int) -> None:
        """Give a free slot to a tag, with all its counts 0."""
        assert tag != 0, "0 marks a free slot"
        self.write(row, slot, [0] * self.counts)
        self._retag(row, slot, tag)

    def free(self, row: int, slot: int) -> None:
        self._retag(row, slot, 0)

    def say_changed(self, row: int) -> None:
        """Have the row's tags read again: its writer may have been killed before it could say so."""
        self._cells[self._starts[row] + _CHANGES] += 1

    def _retag(self, row: int, slot: int, tag: int) -> None:
        self._cells[self._starts[row] + _ROW_HEADER + slot] = tag
        self.say_changed(row)

    def _counts_at(self, row: int, slot: int) -> int:
        return self._starts[row] + _ROW_HEADER + self.slots + slot * self.counts


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
