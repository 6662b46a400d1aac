"""Deadlines of calls to stages: of a whole wait, and of each read of a stream. Both name what took too long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from epd_serve.errors import DeadlineError


class Content(Protocol):
    """The body of an answer, as it comes."""

    async def readany(self) -> bytes:
        """What has come, waiting for some; empty at the end."""

    def at_eof(self) -> bool:
        """The end has come, and everything has been read."""


class deadline:
    """Bound a wait and name it: DeadlineError when it ran out."""

    def __init__(self, seconds: float, what: str) -> None:
        self._seconds = seconds
        self._what = what

    async def __aenter__(self) -> None:
        self._scope = asyncio.timeout(self._seconds)
        await self._scope.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._scope.__aexit__(kind, error, trace)
        except TimeoutError as late:
            raise DeadlineError(f"{self._what} took longer than {self._seconds:g} s") from late


class ReadTimeouts:
    """Bounds each wait for a stream's next bytes. One timer for all of them, put off when it fires early: a timer per
    token would cost more than the token. Runs out by calling `close` on the answer, which ends the wait."""

    def __init__(self, content: Content, close: Callable[[], None], limit_s: float, what: str) -> None:
        self.late: DeadlineError | None = None  # once it has run out
        self._loop = asyncio.get_running_loop()
        self._content = content
        self._close = close
        self._waiting_since: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._limit_s = 0.0
        self.becomes(limit_s, what)

    def becomes(self, limit_s: float, what: str) -> None:
        """Another limit from now on."""
        if limit_s != self._limit_s:
            self._limit_s, self._what = limit_s, what
            self.end()
            self._timer = self._loop.call_later(limit_s, self._look)

    async def readany(self) -> bytes:
        """Raises DeadlineError, or whatever the transport raises."""
        self._waiting_since = self._loop.time()
        try:
            chunk = await self._content.readany()
        finally:
            self._waiting_since = None
        if self.late is not None:
            raise self.late
        return chunk

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        now = self._loop.time()
        due = (now if self._waiting_since is None else self._waiting_since) + self._limit_s
        if due > now:
            self._timer = self._loop.call_at(due, self._look)
            return
        self.late = DeadlineError(f"{self._what} took longer than {self._limit_s:g} s")
        self._close()
