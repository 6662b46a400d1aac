"""What accounts share of a process: memory, and places to work. One may hold as much as it leaves free for the others.

So one alone gets half, two that want all a third each, and whoever comes next always finds something (the dynamic
thresholds of Choudhury and Hahne, 1998, with a factor of one). The last piece is anybody's who has none. Nothing has
to be configured, and nobody has to be known beforehand. Where nothing tells accounts apart, the one that there is may
have everything. All of it is for one event loop.

Bytes are counted before they are held, as they come, and given back when they go; never by what was announced, since
announcing is free. What is counted, and when, `docs/guides/overload.md` has as a formula ("Memory of the front door").
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

from epd_serve.errors import PayloadTooLargeError
from proxy.errors import BusyError
from proxy.tenants.key_limits import KeyLimitError


class FairShare:
    """A limit, and what is held of it by account. An account that holds nothing is not remembered.

    Attributes:
        limit: how much there is. held: by all accounts now.
    """

    def __init__(self, limit: int, *, apart: bool, what: str = "places", code: str = "busy") -> None:
        """
        Args:
            apart: accounts are told apart; otherwise all of `limit` is anybody's.
            what: is held, as a refusal names it. code: of the refusal where none is left.
        """
        self.limit = limit
        self.held = 0
        self._apart = apart
        self._what = what
        self._code = code
        self._held_by: defaultdict[str, int] = defaultdict(int)

    @property
    def most(self) -> int:
        """What one account can hold at best, while nobody else holds anything."""
        return max(self.limit // 2, 1) if self._apart else self.limit

    def held_by(self, account: str) -> int:
        return self._held_by.get(account, 0)

    def fits(self, account: str, amount: int) -> bool:
        """Whether an account may hold so much more now."""
        left = self.limit - self.held - amount
        return left >= 0 and (not self._apart or self.held_by(account) + amount <= max(left, 1))

    def take(self, account: str, amount: int) -> None:
        """Hold more.

        Raises:
            BusyError: 503, all accounts together have taken what there is. KeyLimitError: 429, the rest is kept for
            other accounts. Nothing was taken then.
        """
        if not self.fits(account, amount):
            if self.held + amount > self.limit:
                raise BusyError(
                    f"all of the {self.limit:,} {self._what} that there are for requests are taken; try again later",
                    code=self._code,
                )
            raise KeyLimitError(
                f"requests of this account in progress hold {self.held_by(account):,} {self._what}, which is its "
                "share; try again later",
                retry_after_s=2.0,
            )
        self.held += amount
        self._held_by[account] += amount

    def give_back(self, account: str, amount: int) -> None:
        self.held -= amount
        self._held_by[account] -= amount
        if not self._held_by[account]:
            del self._held_by[account]


class MemoryReservation:
    """The bytes that one request of `account` holds of a share, until the context that it is ends."""

    def __init__(self, share: FairShare, account: str) -> None:
        self._share = share
        self.account = account
        self.size_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back(self.size_bytes)

    def take(self, more_bytes: int) -> None:
        """So many more are about to be held.

        Raises:
            PayloadTooLargeError: 413, the request could never be held. And what `FairShare.take` raises.
        """
        if self.size_bytes + more_bytes > self._share.most:
            raise PayloadTooLargeError(
                f"The request would take more than {self._share.most:,} bytes of this server's memory "
                "(memory.process_bytes), which no request may.",
                code="request_too_large",
            )
        self._share.take(self.account, more_bytes)
        self.size_bytes += more_bytes

    def give_back(self, less_bytes: int) -> None:
        """So many are held no more."""
        assert less_bytes <= self.size_bytes, "more is given back than was taken"
        self.size_bytes -= less_bytes
        self._share.give_back(self.account, less_bytes)

    def handed_over(self) -> MemoryReservation:
        """All of it, for what outlives the request. This one holds nothing then."""
        other = MemoryReservation(self._share, self.account)
        other.size_bytes, self.size_bytes = self.size_bytes, 0
        return other


class FairSemaphore:
    """So many may work at once; the next turn goes to the account that has fewest, of equals to the one that was served
    longest ago, and within an account to whoever came first.

    Args:
        places: at once. spare: an account has at most as many as are free, so that one whose work is slow cannot take
            every place.
    """

    def __init__(self, places: int, *, spare: bool = False) -> None:
        self._share = FairShare(places, apart=spare)
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # in the order in which accounts were served last

    @asynccontextmanager
    async def turn(self, account: str, *, within_s: float | None = None) -> AsyncIterator[None]:
        """One turn, for the time of the context. Raises TimeoutError after `within_s`; without it the caller ends the
        wait."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(account, deque()).append(turn)
        self._hand_out()
        try:
            async with asyncio.timeout(within_s):
                await turn
            yield
        finally:
            if not turn.cancelled():  # it may have come at the very moment at which the wait ended
                self._share.give_back(account, 1)
            self._hand_out()

    def _hand_out(self) -> None:
        while waiting := [account for account in list(self._waiting) if self._is_next(account)]:
            account = min(waiting, key=self._share.held_by)
            self._share.take(account, 1)
            turns = self._waiting.pop(account)
            turns.popleft().set_result(None)
            if turns:
                self._waiting[account] = turns

    def _is_next(self, account: str) -> bool:
        """Whether somebody of it waits, and may have a turn."""
        turns = self._waiting[account]
        while turns and turns[0].done():  # given up
            turns.popleft()
        if not turns:
            del self._waiting[account]
        return bool(turns) and self._share.fits(account, 1)
