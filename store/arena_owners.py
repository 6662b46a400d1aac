"""Which processes have an arena open, and whether they still live. A process is its pid and its start time.

All processes of one arena must see each other's pids (one PID namespace).
"""

from __future__ import annotations

import os
from pathlib import Path

from store.arena_layout import HEADER_WORDS, O_PID, O_START, OWNER_WORDS, Geometry
from store.errors import StoreError


def start_ticks(pid: int) -> int | None:
    """Start of the process in clock ticks since boot (proc(5), field 22); None when it is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may hold anything
    if fields[0] in "ZX":
        return None
    return int(fields[19])


class OwnerTable:
    """The owner rows. Callers hold the arena's lock."""

    def __init__(self, words: memoryview, geometry: Geometry) -> None:
        self._words = words
        self._rows = geometry.owners

    def claim(self) -> int | None:
        """A row for this process, or None when all are taken (some may be dead: reap, then ask again)."""
        start = start_ticks(os.getpid())
        if start is None:
            raise StoreError("arena: cannot read this process's start time from /proc")
        for row in range(self._rows):
            at = HEADER_WORDS + row * OWNER_WORDS
            if self._words[at + O_PID] == 0:
                self._words[at + O_START] = start
                self._words[at + O_PID] = os.getpid()
                return row
        return None

    def give_back(self, row: int) -> None:
        self._words[HEADER_WORDS + row * OWNER_WORDS + O_PID] = 0

    def is_alive(self, row: int) -> bool:
        at = HEADER_WORDS + row * OWNER_WORDS
        pid = self._words[at + O_PID]
        return pid != 0 and start_ticks(pid) == self._words[at + O_START]

    def dead(self) -> list[int]:
        """Rows whose process is gone."""
        taken = (row for row in range(self._rows) if self._words[HEADER_WORDS + row * OWNER_WORDS + O_PID] != 0)
        return [row for row in taken if not self.is_alive(row)]
