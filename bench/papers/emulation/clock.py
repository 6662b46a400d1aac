"""The virtual clock of every emulation: what is due next happens next, and no time passes but by that. Pure."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Clock:
    """Calls in order of their times; of one time, in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call it so many seconds from now, after what is due then already."""
        assert seconds >= 0, f"{seconds} s from now is over"
        heapq.heappush(self._due, (self.now_s + seconds, next(self._numbers), call))

    def run(self) -> None:
        """Until nothing is due any more."""
        while self._due:
            self.now_s, _, call = heapq.heappop(self._due)
            call()
