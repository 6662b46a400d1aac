"""A limit that accounts share: one may hold as much of it as it leaves free for the others. Pure.

So one alone gets half, two that want all a third each, and whoever comes next always finds something (the dynamic
thresholds of Choudhury and Hahne, 1998, with a factor of one). The last piece is anybody's who has none. Nothing has
to be configured, and nobody has to be known beforehand. Where nothing tells accounts apart, the one that there is may
have everything.
"""

from __future__ import annotations


class NoRoom(Exception):
    """All accounts together have taken what there is."""


class OverShare(Exception):
    """There is room, and it is kept for other accounts."""


class FairShare:
    """Counts what is held, by account. For one event loop; an account that holds nothing is not remembered.

    Attributes:
        held: by all accounts now.
    """

    def __init__(self, limit: int, *, apart: bool) -> None:
        """`apart`: accounts are told apart; otherwise all of `limit` is anybody's."""
        self.limit = limit
        self.held = 0
        self._apart = apart
        self._held_by: dict[str, int] = {}

    @property
    def most(self) -> int:
        """What one account can hold at best, while nobody else holds anything."""
        return max(self.limit // 2, 1) if self._apart else self.limit

    def held_by(self, account: str) -> int:
        return self._held_by.get(account, 0)

    def take(self, account: str, amount: int) -> None:
        """Hold more. Raises NoRoom or OverShare, and then nothing was taken."""
        left = self.limit - self.held - amount
        if left < 0:
            raise NoRoom
        held = self._held_by.get(account, 0) + amount
        if self._apart and held > max(left, 1):
            raise OverShare
        self.held += amount
        self._held_by[account] = held

    def give_back(self, account: str, amount: int) -> None:
        left = self._held_by.get(account, 0) - amount
        assert left >= 0, "more is given back than was taken"
        self.held -= amount
        if left:
            self._held_by[account] = left
        else:
            self._held_by.pop(account, None)
