"""Which bytes of a staging memory are in use. Pure."""

from __future__ import annotations

from collections import deque

ALIGN = 4096


class StagingRing:
    """Which bytes of the staging memory are in use: first in, first out."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._held: deque[tuple[int, int, int]] = deque()  # (seq, start, end), oldest first
        self._returned: set[int] = set()

    def take(self, seq: int, size: int) -> int | None:
        """Offset of `size` free contiguous bytes, or None while there are none."""
        size = -(-size // ALIGN) * ALIGN
        start = self._free(size)
        if start is not None:
            self._held.append((seq, start, start + size))
        return start

    def fits(self, size: int) -> bool:
        """Whether `take` would find room."""
        return self._free(-(-size // ALIGN) * ALIGN) is not None

    def _free(self, size: int) -> int | None:
        assert size <= self.capacity
        if not self._held:
            return 0
        tail, head = self._held[0][1], self._held[-1][2]
        if head > tail:  # used bytes do not wrap: room behind them, else before them
            if self.capacity - head >= size:
                return head
            return 0 if size <= tail else None
        return head if tail - head >= size else None

    def give_back(self, seq: int) -> None:
        """Credit for a packet; space frees in order."""
        self._returned.add(seq)
        while self._held and self._held[0][0] in self._returned:
            self._returned.discard(self._held.popleft()[0])
