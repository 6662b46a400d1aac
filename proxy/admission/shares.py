"""Fair shares of the stages between accounts, by weight: start-time fair queueing (Goyal, Vin and Cheng, 1996). Pure.

What counts is service in predicted seconds of an instance, divided by the account's weight. Each account has had so
much by a virtual time that goes on with whoever is served, but never past one that waits, and nobody falls behind it
by more than `SAVED_S` who asks for less: what was used while nobody else wanted it is held against nobody, and a burst
of who asks for little goes first. Whoever is more than `AHEAD_S` ahead of the one of those that wait who has had least
is over its share: its requests go after those of all others, whatever their deadlines, so what it asks beyond its share
delays nobody else. While nobody else waits it may have everything.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from statistics import median

AHEAD_S = 0.1
SAVED_S = 1.0
"""Who asked for less than its share has so much before others: requests come in bursts, also of who asks for little."""

MOST = 1024
"""Accounts that are remembered. Of more the half that had least are all as if they had nothing."""


class Shares:
    """What accounts have had."""

    def __init__(self) -> None:
        self._now = 0.0
        self._until: dict[str, float] = {}

    def charge(self, account: str, seconds: float, weight: float, waiting: Iterable[str]) -> None:
        """It has been given so much of an instance, while these wait."""
        begin = self.had(account)
        self._now = max(self._now, min([begin, *map(self.had, waiting)]))
        self._until[account] = begin + seconds / weight
        if len(self._until) > MOST:
            self._now = max(self._now, median(self._until.values()))
            self._until = {one: until for one, until in self._until.items() if until > self._now}

    def had(self, account: str) -> float:
        """Until when, in virtual seconds."""
        return max(self._now - SAVED_S, self._until.get(account, -SAVED_S))

    def over(self, waiting: Collection[str]) -> frozenset[str]:
        """Those of the accounts that wait which are over their share."""
        if len(waiting) < 2:
            return frozenset()
        most = min(map(self.had, waiting)) + AHEAD_S
        return frozenset(one for one in waiting if self.had(one) > most)
