"""The HTTP/1.1 of the load generator: one prepared request at a time per connection, answers read without copies.

Cheap on purpose: on a machine of two cores whatever the generator costs is taken from what it measures. A request is
bytes made beforehand, an answer is a status, its times and a count of events; only the end of its body is kept, which
says whether a stream ended well. Owns no schedule: that is `bench/load.py`'s.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

from epd_serve.errors import StageError

TAIL_BYTES = 1024  # holds a whole error
BLANK_LINE = b"\n\n"


@dataclass(slots=True)
class Answer:
    """What came back. Times in seconds of `time.perf_counter`, 0 where there was none.

    Attributes:
        status: of HTTP; 0 where the connection broke first.
        first: first byte of the body. ended: the last one.
        events: blank lines in the body, which is how many events a stream had.
        tail: the end of the body.
    """

    status: int = 0
    sent: float = 0.0
    first: float = 0.0
    ended: float = 0.0
    events: int = 0
    tail: bytes = field(default=b"", repr=False)

    def good(self, *, stream: bool) -> bool:
        """A complete answer; of a stream, with its [DONE]."""
        if self.status != 200 or not self.ended:
            return False
        return self.tail.endswith(b"data: [DONE]\n\n") if stream else self.tail.endswith(b"}")


def post(url: str, path: str, body: bytes, **headers: str) -> bytes:
    """A POST of JSON to the server at `url`, ready to be written."""
    parts = urlsplit(url)
    lines = [
        f"POST {path} HTTP/1.1",
        f"host: {parts.netloc}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class Connection(asyncio.Protocol):
    """A connection that asks one thing at a time. Parser callbacks have httptools' names."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer = Answer()
        self._waiter: asyncio.Future[Answer] | None = None
        self._parser: Any = None
        self._keeps = False

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def ask(self, request: bytes) -> asyncio.Future[Answer]:
        """The answer to `request`; a broken connection is an answer with status 0 or without an end."""
        assert self._waiter is None and self._transport is not None, "one request at a time on an open connection"
        self._answer = Answer(sent=time.perf_counter())
        self._parser = httptools.HttpResponseParser(self)
        self._waiter = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._waiter

    @property
    def begun(self) -> bool:
        """The body of the answer to the last request has begun."""
        return bool(self._answer.first)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._settle()

    # httptools.HttpResponseParser

    def on_headers_complete(self) -> None:
        self._answer.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        answer = self._answer
        if not answer.first:
            answer.first = time.perf_counter()
        answer.events += body.count(BLANK_LINE)
        answer.tail = body[-TAIL_BYTES:] if len(body) >= TAIL_BYTES else (answer.tail + body)[-TAIL_BYTES:]

    def on_message_complete(self) -> None:
        self._answer.ended = time.perf_counter()
        if not self._parser.should_keep_alive():
            self.close()
        self._settle()

    def _settle(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(self._answer)


async def connect(url: str, timeout_s: float = 5.0) -> Connection:
    """A connection to the server at `url`. Raises StageError when nobody answers there."""
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None, f"{url} is not http://HOST:PORT"
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_s):
            _, connection = await loop.create_connection(Connection, parts.hostname, parts.port)
    except (OSError, TimeoutError) as error:
        raise StageError(f"{url} cannot be reached ({error})", stage=url) from error
    return connection
