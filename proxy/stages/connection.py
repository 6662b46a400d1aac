"""One HTTP/1.1 connection to a stage's server: one request at a time, and its answer as it comes.

httptools parses, as it does in uvicorn; what is left is little, and a third of the CPU time of a client library that
serves everybody (docs/benchmarks.md, "The proxy"). Owns bytes, waits and their limit. Which connection serves which
call, and what a failure is called, is `proxy/stages/client.py`'s business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import httptools

from epd_serve.errors import DeadlineError
from proxy.request.payload import Pieces

READ_AHEAD_BYTES = 64 << 10
"""Of an answer that nobody takes; then the stage has to wait."""
ONE_WRITE_BYTES = 64 << 10
"""A request up to this size is copied behind its head, so that both go in one write."""


class Connection(asyncio.Protocol):
    """For one event loop. Parser callbacks have httptools' names.

    Every wait raises ConnectionError when the connection breaks before the answer is complete, and DeadlineError after
    the limit, which breaks it.

    Args:
        lost: called when the connection has ended, whoever ended it.

    Attributes:
        status: of the answer; 0 before its head has come.
        complete: the answer has come whole, or nothing was asked yet.
    """

    def __init__(self, lost: Callable[[Connection], None]) -> None:
        self.status = 0
        self.complete = True
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser: Any = httptools.HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self._size_bytes = 0
        self._reading_paused = self._writing_paused = self._used_up = False
        self._waiter: asyncio.Future[None] | None = None
        self._ready: Callable[[], bool] = bool
        self._waiting_since: float | None = None
        self._limit_s, self._what = 0.0, ""
        self._timer: asyncio.TimerHandle | None = None
        self._late: DeadlineError | None = None
        self._completed: Callable[[Connection], None] | None = None

    @property
    def reusable(self) -> bool:
        """It can take another request."""
        return self.complete and not self._used_up and self._transport is not None and not self._transport.is_closing()

    def limit(self, limit_s: float, what: str) -> None:
        """Bound every wait from now on. One timer for all of them, put off when it fires early: a timer per token would
        cost more than the token."""
        self._limit_s, self._what = limit_s, what
        self._stop_timer()
        self._timer = self._loop.call_later(limit_s, self._look)

    async def send(self, head: bytes, body: bytes | Pieces) -> None:
        """Write a request, no faster than the stage takes it; an answer that comes before its end ends the writing."""
        assert self.complete and self._transport is not None, "one request at a time on an open connection"
        self.status, self.complete = 0, False
        if isinstance(body, bytes) and len(body) <= ONE_WRITE_BYTES:
            self._transport.write(head + body)
            return
        self._transport.write(head)
        for part in Pieces([body]) if isinstance(body, bytes) else body:
            if self.status:
                self._used_up = True  # the stage still expects the rest
                return
            self._transport.write(part)
            if self._writing_paused:
                await self._until(self._is_taken)

    async def head(self) -> int:
        """The status, once it is there."""
        await self._until(self._is_answered)
        return self.status

    async def read(self) -> bytes:
        """What has come of the body, waiting for some; empty at its end."""
        await self._until(self._has_some)
        return self._taken()

    async def whole(self) -> bytes:
        """All of the body."""
        parts = []
        while True:
            await self._until(self._has_all_it_can)
            parts.append(self._taken())
            if self.complete:
                return b"".join(parts)

    def leave(self, completed: Callable[[Connection], None], *, within_s: float) -> None:
        """Nobody waits any more. `completed` gets the connection once the answer is complete, at once where it is; an
        answer that takes longer is cut off, and with it the stage's work."""
        self._stop_timer()
        if self.complete:
            self._taken()
            completed(self)
        elif within_s:
            self._completed = completed
            self._timer = self._loop.call_later(within_s, self.close)
        else:
            self.close()

    def close(self) -> None:
        """Break it, which is what makes vLLM abort the request."""
        self._stop_timer()
        if self._transport is not None:
            self._transport.abort()

    # --- waits --------------------------------------------------------------------------------------------------------

    async def _until(self, ready: Callable[[], bool]) -> None:
        if not ready() and self._transport is not None:
            self._ready, self._waiting_since = ready, self._loop.time()
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = self._waiting_since = None
        if self._transport is None and not self.complete:
            raise self._late or ConnectionError("it broke before the answer was complete")

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done() and (self._transport is None or self._ready()):
            self._waiter.set_result(None)

    def _is_taken(self) -> bool:
        return not self._writing_paused or bool(self.status)

    def _is_answered(self) -> bool:
        return bool(self.status)

    def _has_some(self) -> bool:
        return bool(self._pieces) or self.complete

    def _has_all_it_can(self) -> bool:
        return self.complete or self._reading_paused

    def _taken(self) -> bytes:
        pieces, self._pieces, self._size_bytes = self._pieces, [], 0
        if self._reading_paused and self._transport is not None:
            self._reading_paused = False
            self._transport.resume_reading()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _look(self) -> None:
        now = self._loop.time()
        due = (now if self._waiting_since is None else self._waiting_since) + self._limit_s
        if due > now:
            self._timer = self._loop.call_at(due, self._look)
            return
        self._late = DeadlineError(f"{self._what} took longer than {self._limit_s:g} s")
        self.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # --- asyncio ------------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by name

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = self._parser = None  # parser and connection hold one another
        self._stop_timer()
        self._lost(self)
        self._wake()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.close()
        self._wake()

    def pause_writing(self) -> None:
        self._writing_paused = True

    def resume_writing(self) -> None:
        self._writing_paused = False
        self._wake()

    # --- httptools ----------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.complete:  # nothing was asked
            self._used_up = True
            self.close()

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        self.status = status if status >= 200 else 0  # "100 Continue" announces nothing

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)
        self._size_bytes += len(body)
        if self._size_bytes > READ_AHEAD_BYTES and not self._reading_paused and self._transport is not None:
            self._reading_paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if not self.status:
            return
        self.complete = True
        self._used_up = self._used_up or not self._parser.should_keep_alive()
        completed, self._completed = self._completed, None
        if completed is not None:
            self._stop_timer()
            self._taken()
            completed(self)
