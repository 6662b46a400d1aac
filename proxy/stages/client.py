"""HTTP to the stages: the connections kept to each, and the one place where failures of the network get our names.

`StageClient` says which connection serves which call, and what a failure is called. `Connection` is HTTP/1.1 for one
request at a time, and its answer as it comes; it owns bytes, waits and their limit. httptools parses, as it does in
uvicorn; what is left is little, and a third of the CPU time of a client library that serves everybody
(docs/benchmarks.md, "The proxy").

Leaving a call early (cancellation, an error, a deadline) closes its connection, which is what makes vLLM abort the
request.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import lru_cache, partial
from typing import Any, cast

import httptools

from epd_serve import endpoint
from epd_serve.errors import DeadlineError, StageError
from epd_serve.instances import KEEP_ALIVE_S, Instance
from proxy import strict_json
from proxy.config.limits import Timeouts
from proxy.errors import StageDied, StageUnreachable, stage_answer_error
from proxy.stages.sse import WholeEvents
from proxy.strict_json import Pieces

REST_S = 0.1
"""For the end of a stream whose last event is there: servers send it apart."""
CONTENT_HEADERS = "content-type: application/json\r\naccept: */*\r\nuser-agent: epd-serve\r\n"
IDLE_S = 0.8 * KEEP_ALIVE_S
"""An unused connection is closed after so long: well before the stage does, or a request would meet that."""
READ_AHEAD_BYTES = 64 << 10
"""Of an answer that nobody takes; then the stage has to wait."""
ONE_WRITE_BYTES = 64 << 10
"""A request up to this size is copied behind its head, so that both go in one write."""


class StageClient:
    """Posts to stages. Every method raises only errors of `epd_serve.errors` (and CancelledError)."""

    def __init__(self, timeouts: Timeouts, *, key: str = "") -> None:
        """`key`: bearer token of the stages; "" where their sockets are in a private folder."""
        self._timeouts = timeouts
        self._always = CONTENT_HEADERS + (f"authorization: Bearer {key}\r\n" if key else "")
        self._idle: defaultdict[str, dict[Connection, None]] = defaultdict(dict)
        """By URL: unused connections, the one used last at the end."""

    async def aclose(self) -> None:
        for connections in self._idle.values():
            for connection in tuple(connections):
                connection.close()

    async def post(
        self,
        instance: Instance,
        path: str,
        body: bytes | Pieces,
        headers: Mapping[str, str],
        *,
        timeout_s: float | None,
        decode: Callable[[bytes], Any] = strict_json.decode,
    ) -> dict[str, Any]:
        """The JSON answer of a non-streamed request.

        Args:
            timeout_s: None where the caller bounds the wait, as the exchange does for all of a request.
            decode: of JSON, an object in the end.

        Raises:
            StageRefusal: 4xx. StageError: 5xx, not JSON. StageDied: broken connection. StageUnreachable. DeadlineError.
        """
        if timeout_s is None:
            status, raw = await self._asked(instance, path, body, headers)
        else:
            async with deadline(timeout_s, f"stage {instance.id}"):
                status, raw = await self._asked(instance, path, body, headers)
        if status != 200:
            raise stage_answer_error(raw, stage=instance.id, status=status)
        try:
            answer = decode(raw)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise StageError(f"stage {instance.id} answered something that is no JSON object", stage=instance.id)
        return answer

    async def _asked(
        self, instance: Instance, path: str, body: bytes | Pieces, headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        """The status and the body of an answer, once it is whole."""
        connection = await self._connection(instance)
        try:
            await connection.send(self._head(instance, path, body, headers), body)
            raw = await connection.whole()
            return connection.status, raw
        except ConnectionError as error:
            raise StageDied(f"stage {instance.id} broke its connection", stage=instance.id) from error
        finally:
            connection.leave(self._idle[instance.url].setdefault)

    async def events(
        self, instance: Instance, path: str, body: bytes | Pieces, headers: Mapping[str, str]
    ) -> AsyncGenerator[bytes, None]:
        """The SSE events of a streamed request, byte for byte, as many at a time as have come whole. Use under
        `contextlib.aclosing`.

        Raises:
            As `post`; DeadlineError when the first event or the next one is late.
        """
        whole, begun = WholeEvents(), False
        connection = await self._connection(instance)
        try:
            connection.limit(self._timeouts.first_byte_s, f"the first token from stage {instance.id}")
            await connection.send(self._head(instance, path, body, headers), body)
            if await connection.head() != 200:
                raise stage_answer_error(await connection.whole(), stage=instance.id, status=connection.status)
            while not whole.done and (chunk := await connection.read()):
                if events := whole.feed(chunk):
                    if not begun:
                        begun = True
                        connection.limit(self._timeouts.idle_s, f"the next token from stage {instance.id}")
                    yield events
        except ConnectionError as error:
            raise StageDied(f"stage {instance.id} broke its connection", stage=instance.id) from error
        finally:
            connection.leave(self._idle[instance.url].setdefault, within_s=REST_S if whole.done else 0.0)

    def _head(self, instance: Instance, path: str, body: bytes | Pieces, headers: Mapping[str, str]) -> bytes:
        """Of a request. All headers are our own words, or a client's that a server has parsed: no line breaks."""
        more = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        return f"{_beginning(instance.url, path)}{self._always}{more}content-length: {len(body)}\r\n\r\n".encode()

    async def _connection(self, instance: Instance) -> Connection:
        """One that nobody uses, a new one where there is none. Raises StageUnreachable."""
        idle = self._idle[instance.url]
        while idle:
            connection, _ = idle.popitem()
            if connection.taken():
                return connection
        try:
            async with asyncio.timeout(self._timeouts.connect_s):
                return (await endpoint.connect(instance.url, partial(Connection, partial(self._lost, instance.url))))[1]
        except OSError as error:  # TimeoutError is one
            raise StageUnreachable(f"stage {instance.id} cannot be reached", stage=instance.id) from error

    def _lost(self, url: str, connection: Connection) -> None:
        self._idle[url].pop(connection, None)


@lru_cache(maxsize=1024)
def _beginning(url: str, path: str) -> str:
    """Of the head of a request."""
    address = endpoint.for_http(url)
    return f"POST {address.path.rstrip('/')}{path} HTTP/1.1\r\nhost: {address.netloc}\r\n"


@asynccontextmanager
async def deadline(seconds: float, what: str) -> AsyncIterator[None]:
    """Bound a wait and name it: DeadlineError when it ran out."""
    scope = asyncio.timeout(seconds)
    try:
        async with scope:
            yield
    except TimeoutError as late:
        if not scope.expired():
            raise
        raise DeadlineError(f"{what} took longer than {seconds:g} s") from late


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
