"""So many may work at once, and whoever of several accounts waits gets the next turn fairly, within a time.

The next turn goes to the account that has fewest; within an account, to whoever came first. With `spare` an account has
at most as many as are free (`proxy/tenants/fair_share.py`), so that one whose work is slow cannot take every place.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from proxy.tenants.fair_share import FairShare, NoRoom, OverShare


class TurnTimeout(Exception):
    """None came in time."""


class FairSemaphore:
    """A semaphore whose places accounts get in turns. For one event loop.

    Args:
        places: at once. spare: keep some free for accounts that have none.
    """

    def __init__(self, places: int, *, spare: bool = False) -> None:
        self._share = FairShare(places, apart=spare)
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # in the order in which accounts were served last

    @asynccontextmanager
    async def turn(self, account: str, *, within_s: float | None = None) -> AsyncIterator[None]:
        """One turn, for the time of the context. Raises NoTurn after `within_s`; else the caller ends the wait."""
        if account in self._waiting or not self._take(account):
            await self._wait(account, within_s)
        try:
            yield
        finally:
            self._give_back(account)

    def _take(self, account: str) -> bool:
        try:
            self._share.take(account, 1)
        except (NoRoom, OverShare):
            return False
        return True

    def _give_back(self, account: str) -> None:
        self._share.give_back(account, 1)
        self._hand_out()

    async def _wait(self, account: str, within_s: float | None) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(account, deque()).append(turn)
        try:
            async with asyncio.timeout(within_s):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():  # it came at the very moment
                self._give_back(account)
            else:
                self._leave(account, turn)
            if isinstance(error, TimeoutError):
                raise TurnTimeout from None
            raise

    def _leave(self, account: str, turn: asyncio.Future[None]) -> None:
        queue = self._waiting.get(account)
        if queue is not None and turn in queue:
            queue.remove(turn)
            if not queue:
                del self._waiting[account]

    def _hand_out(self) -> None:
        while (account := self._next()) is not None:
            queue = self._waiting.pop(account)
            queue.popleft().set_result(None)
            if queue:
                self._waiting[account] = queue

    def _next(self) -> str | None:
        """The account whose first waiter gets a turn, which is taken; None where nobody may have one."""
        for account in sorted(self._waiting, key=self._share.held_by):  # stable: who was served longest ago
            queue = self._waiting[account]
            while queue and queue[0].done():  # given up, and has not run since
                queue.popleft()
            if not queue:
                del self._waiting[account]
            elif self._take(account):
                return account
        return None
