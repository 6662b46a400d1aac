"""A small HTTP/1.1 server for simulated stages: one protocol object per connection, no tasks, no framework.

It answers as vLLM's uvicorn does where a proxy can tell: keep-alive with an end, chunked event streams, and
a client that goes away is noticed at once. Requests of one connection are answered one after the other.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from http import HTTPStatus
from typing import cast

import httptools
import msgspec

from epd_serve.instances import KEEP_ALIVE_S

MAX_BODY_BYTES = 256 << 20
MAX_PIPELINED = 16
JSON = b"application/json"
_EVENTS = b"text/event-stream; charset=utf-8"


class Exchange:
    """One request and its answer: `respond` once, or `start_events`, `event`…, `finish`.

    Attributes:
        headers: names in lower case.
        on_gone: called when the client has left before the answer was complete.
        answered: the answer is complete, or nobody waits for it.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.method = ""
        self.path = ""
        self.headers: dict[bytes, bytes] = {}
        self.body = b""
        self.on_gone: Callable[[], None] | None = None
        self.streaming = False
        self.answered = False

    def respond(
        self, status: int, body: bytes = b"", content_type: bytes = JSON, headers: tuple[tuple[bytes, bytes], ...] = ()
    ) -> None:
        """The whole answer. Nothing happens if the client has left."""
        if self.answered:
            return
        self.answered = True
        more = b"".join(b"%s: %s\r\n" % header for header in headers)
        head = b"HTTP/1.1 %d %s\r\ncontent-length: %d\r\ncontent-type: %s\r\n%s\r\n"
        phrase = HTTPStatus(status).phrase.encode()
        self._connection.write(head % (status, phrase, len(body), content_type, more) + body)
        self._connection.done(self)

    def respond_json(self, value: object, status: int = 200) -> None:
        self.respond(status, msgspec.json.encode(value))

    def refuse(self, status: int, message: str, *, kind: str = "", param: str | None = None) -> None:
        """An error as vLLM shapes it; inside a stream, as an event."""
        phrase = HTTPStatus(status).phrase
        kind = kind or {400: "BadRequestError", 404: "NotFoundError", 500: "InternalServerError"}.get(status, phrase)
        error = {"error": {"message": message, "type": kind, "param": param, "code": status}}
        if self.streaming:
            self.event(b"data: " + msgspec.json.encode(error) + b"\n\n")
            self.event(b"data: [DONE]\n\n")
            self.finish()
        else:
            self.respond_json(error, status)

    def start_events(self) -> None:
        """Status and headers of an event stream."""
        if self.answered or self.streaming:
            return
        self.streaming = True
        head = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ntransfer-encoding: chunked\r\n\r\n"
        self._connection.write(head % _EVENTS)

    def event(self, data: bytes) -> None:
        """One event with its blank line; starts the stream if need be."""
        if not self.answered:
            self.start_events()
            self._connection.write(b"%x\r\n%s\r\n" % (len(data), data))

    def finish(self) -> None:
        """The stream is over."""
        if not self.answered:
            self.answered = True
            self._connection.write(b"0\r\n\r\n")
            self._connection.done(self)

    def abort(self) -> None:
        """Break the connection in the middle of the answer."""
        self._connection.abort()

    def gone(self) -> None:
        """The connection says that the client has left."""
        if not self.answered:
            self.answered = True
            if self.on_gone is not None:
                self.on_gone()


Handler = Callable[[Exchange], None]


class Connection(asyncio.Protocol):
    """One client. `connections`: all that are open, kept up to date."""

    def __init__(self, handle: Handler, connections: set[Connection]) -> None:
        self._handle = handle
        self._connections = connections
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._incoming = Exchange(self)
        self._parts: list[bytes] = []
        self._size = 0
        self._queue: deque[Exchange] = deque()
        self._current: Exchange | None = None
        self._idle: asyncio.TimerHandle | None = None

    # --- asyncio --------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by name
        self._connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._connections.discard(self)
        self._queue.clear()
        self._rest()
        if self._current is not None:
            self._current.gone()

    def data_received(self, data: bytes) -> None:
        self._rest()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.abort()
        except httptools.HttpParserError:
            if self._transport is not None:
                self._transport.write(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
                self._transport.close()

    # --- httptools ------------------------------------------------------------------------------------------------

    def on_url(self, url: bytes) -> None:
        self._incoming.path = url.partition(b"?")[0].decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._incoming.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self._incoming.method = self._parser.get_method().decode()
        if self._incoming.headers.get(b"expect", b"").lower() == b"100-continue":
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._size += len(body)
        if self._size <= MAX_BODY_BYTES:
            self._parts.append(body)
        else:
            self._parts.clear()

    def on_message_complete(self) -> None:
        exchange, self._incoming = self._incoming, Exchange(self)
        exchange.body = b"".join(self._parts)
        too_large, self._size = self._size > MAX_BODY_BYTES, 0
        self._parts = []
        if len(self._queue) >= MAX_PIPELINED:
            self.abort()
        elif too_large:
            exchange.refuse(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
            self.close()
        else:
            self._queue.append(exchange)
            self._next()

    # --- answers --------------------------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def done(self, exchange: Exchange) -> None:
        """The answer is complete: the next request's turn, or the end after a while."""
        if exchange is not self._current:
            return
        self._current = None
        if exchange.headers.get(b"connection", b"").lower() == b"close" and self._transport is not None:
            self._transport.close()
        elif self._queue:
            asyncio.get_running_loop().call_soon(self._next)
        elif self._transport is not None:
            self._idle = asyncio.get_running_loop().call_later(KEEP_ALIVE_S, self.close)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    @property
    def busy(self) -> bool:
        return self._current is not None

    def _next(self) -> None:
        if self._current is None and self._queue and self._transport is not None:
            self._current = self._queue.popleft()
            self._handle(self._current)

    def _rest(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
