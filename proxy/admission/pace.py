"""How long a wait in a line may take, by how fast the line has moved. Pure."""

from __future__ import annotations

import math

HALF_LIFE_S = 10.0
LEAST_GRANTS = 3.0
"""So many have to have been let through, lately, before anything is predicted."""


class Pace:
    """How fast a line moves, what predicted waits rest on: grants per second of backlog, of late. Time without a
    backlog says nothing: the line was waiting, not moving."""

    def __init__(self) -> None:
        self._grants = 0.0
        self._backlog_s = 0.0
        self._since: float | None = None  # when a backlog was last taken into account; None without one

    def tick(self, now: float, *, backlog: bool) -> None:
        """Note that from `now` on there is a backlog, or none."""
        if self._since is not None and now > self._since:
            passed_s = now - self._since
            decay = 0.5 ** (passed_s / HALF_LIFE_S)
            self._grants *= decay
            self._backlog_s = self._backlog_s * decay + passed_s
        self._since = now if backlog else None

    def granted(self) -> None:
        """One that had to wait in the line has gone."""
        self._grants += 1.0

    def wait_s(self, ahead: int, now: float, *, at_least: bool = False) -> float | None:
        """How long it takes until `ahead` have gone; None while nobody can tell.

        Args:
            at_least: at the fastest pace at which it may well be no more than chance that so few have gone: twice the
                standard deviation of their count above it. At the beginning of a backlog there are few.
        """
        if not ahead:
            return 0.0
        self.tick(now, backlog=self._since is not None)
        if self._grants < LEAST_GRANTS or self._backlog_s <= 0:
            return None
        grants = self._grants + (2 * math.sqrt(self._grants) + 1 if at_least else 0.0)
        return ahead * self._backlog_s / grants
