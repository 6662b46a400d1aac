"""A pause: new requests wait, for the deployment makes room for a change; and the clock of those who wait.

That clock stands still meanwhile, so that nobody's wait comes to its end because of a pause, and nobody takes a queue
that may not move for a slow one. It goes on by itself when the time of the pause is over, whoever began it.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Pause:
    """In the status table, where admission, routing and the encode step find it.

    Args:
        clock: seconds that only ever grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = self._until = clock()
        self._stood_s = 0.0  # in pauses before this one

    def begin(self, duration_s: float) -> None:
        """Pause for so long from now, whatever was said before; 0 ends it."""
        now = self._clock()
        self._stood_s += min(now, self._until) - self._began
        self._began, self._until = now, now + duration_s

    @property
    def left_s(self) -> float:
        """For how long it goes on; 0 where there is none."""
        return max(0.0, self._until - self._clock())

    def now(self) -> float:
        """The clock of those who wait."""
        now = self._clock()
        return now - self._stood_s - ((now if now < self._until else self._until) - self._began)
