"""One HTTP/1.1 connection to a stage's server: one request at a time, and its answer as it comes.

httptools parses, as it does in uvicorn; what is left is little, and a third of the CPU time of a client library that
serves everybody (docs/benchmarks.md, "The proxy"). Owns bytes, waits and their limit. Which connection serves which
call, and what a failure is called, is `proxy/stages/client.py`'s business.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any, cast

import httptools

from epd_serve.errors import DeadlineError
from epd_serve.instances import KEEP_ALIVE_S
from proxy.request.payload import Pieces

IDLE_S = 0.8 * KEEP_ALIVE_S
"""An unused connection is closed after so long: well before the stage does, or a request would meet that."""
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
        self._body = bytearray()
        self._writing_paused = self._used_up = False
        self._waiter: asyncio.Future[None] | None = None
        self._waiting_since: float | None = None
        self._limit_s, self._what = math.inf, ""
        self._timer: asyncio.TimerHandle | None = None
        self._late: DeadlineError | None = None
        self._kept: Callable[[Connection], object] | None = None

    def taken(self) -> bool:
        """Use it again. False: it can take no other request, and is closed."""
        self._limit_s, self._waiting_since = math.inf, None
        if self.complete and not self._used_up and self._transport is not None and not self._transport.is_closing():
            return True
        self.close()
        return False

    def limit(self, limit_s: float, what: str = "") -> None:
        """Bound every wait from now on. One timer for all of them, put off when it fires early: a timer per token would
        cost more than the token."""
        self._limit_s, self._what = limit_s, what
        due = self._loop.time() + limit_s
        if self._timer is None or self._timer.when() > due:
            self._set_timer(due)

    async def send(self, head: bytes, body: bytes | Pieces) -> None:
        """Write a request, no faster than the stage takes it; an answer that comes before its end ends the writing."""
        assert self.complete and self._transport is not None, "one request at a time on an open connection"
        self.status, self.complete = 0, False
        if isinstance(body, bytes) and len(body) <= ONE_WRITE_BYTES:
            self._transport.write(head + body)
            return
        self._transport.write(head)
        for part in Pieces([body]) if isinstance(body, bytes) else body:
            while self._writing_paused and not self.status:
                await self._change()
            if self.status:
                self._used_up = True  # the stage still expects the rest
                return
            self._transport.write(part)

    async def head(self) -> int:
        """The status, once it is there."""
        while not self.status:
            await self._change()
        return self.status

    async def read(self) -> bytes:
        """What has come of the body, waiting for some; empty at its end."""
        while not (self._body or self.complete):
            await self._change()
        return self._take()

    async def whole(self) -> bytes:
        """All of the body."""
        parts = []
        while part := await self.read():
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def leave(self, kept: Callable[[Connection], object], *, within_s: float = 0.0) -> None:
        """Nobody waits any more. `kept` gets the connection once the answer is complete, for the next request within
        `IDLE_S`; an answer that takes longer than `within_s` is cut off, and with it the stage's work."""
        self._kept = kept
        if self.complete:
            self._rest()
        elif within_s:
            self._waiting_since = self._loop.time()
            self.limit(within_s)
        else:
            self.close()

    def _rest(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None and self.taken():
            self._take()
            kept(self)
            self._waiting_since = self._loop.time()
            self.limit(IDLE_S)

    def close(self) -> None:
        """Break it, which is what makes vLLM abort the request."""
        if self._transport is not None:
            self._transport.abort()

    # --- waits --------------------------------------------------------------------------------------------------------

    async def _change(self) -> None:
        """Until something has come, or may be written again."""
        if self._transport is not None:
            self._waiting_since = self._loop.time()
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = self._waiting_since = None
        if self._transport is None and not self.complete:
            raise self._late or ConnectionError("it broke before the answer was complete")

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _take(self) -> bytes:
        if len(self._body) > READ_AHEAD_BYTES and self._transport is not None:
            self._transport.resume_reading()
        taken = bytes(self._body)
        self._body.clear()
        return taken

    def _look(self) -> None:
        self._timer = None
        now = self._loop.time()
        due = (now if self._waiting_since is None else self._waiting_since) + self._limit_s
        if due <= now:
            self._late = DeadlineError(f"{self._what} took longer than {self._limit_s:g} s")
            self.close()
        elif due < math.inf:
            self._set_timer(due)

    def _set_timer(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self._look)

    # --- asyncio ------------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by name

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = self._parser = None  # parser and connection hold one another
        if self._timer is not None:
            self._timer.cancel()
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
        self._body += body
        if len(self._body) > READ_AHEAD_BYTES and self._transport is not None:
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self.status:
            self.complete = True
            self._used_up = self._used_up or not self._parser.should_keep_alive()
            self._rest()
