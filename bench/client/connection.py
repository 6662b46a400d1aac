"""The HTTP/1.1 of the load generator: one prepared request at a time per connection, answers read without copies.

Cheap on purpose: on a machine of two cores whatever the generator costs is taken from what it measures. A request is
bytes made beforehand. An answer is a status, its times, a count of events and the end of its body; who asks for it also
gets every read of the body with its time. Owns no schedule, and understands nothing of what it reads.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import httptools

from bench.client.endpoint import Endpoint
from epd_serve.errors import StageError

TAIL_BYTES = 1024  # holds a whole error
KEPT_BYTES = 16 << 20
"""Of one answer, at most. A server that never stops talking is not listened to any longer."""
BLANK_LINE = b"\n\n"


@dataclass(slots=True)
class Kept:
    """What is kept of an answer beyond its times, for who asks for it.

    Attributes:
        pieces: the body as it was read, each with its time. headers: names in lower case. nbytes: of all pieces.
    """

    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    headers: dict[bytes, bytes] = field(default_factory=dict)
    nbytes: int = 0


@dataclass(slots=True)
class Answer:
    """What came back. Times in seconds of `time.perf_counter` (CLOCK_MONOTONIC), 0 where there was none.

    Attributes:
        status: of HTTP; 0 where the connection broke first.
        first: first byte of the body. ended: the last one.
        events: blank lines in the body, which is how many events a stream had.
        tail: the end of the body. kept: the whole of it, where that was asked for.
        garbage: what came was not HTTP, or too much of it.
    """

    status: int = 0
    sent: float = 0.0
    first: float = 0.0
    ended: float = 0.0
    events: int = 0
    tail: bytes = field(default=b"", repr=False)
    kept: Kept | None = field(default=None, repr=False)
    garbage: str = ""

    def good(self, *, stream: bool) -> bool:
        """A complete answer; of a stream, with its [DONE]."""
        if self.status != 200 or not self.ended:
            return False
        return self.tail.endswith(b"data: [DONE]\n\n") if stream else self.tail.endswith(b"}")


def post(url: str, path: str, body: bytes, **headers: str) -> bytes:
    """A POST of JSON to the server at `url`, ready to be written."""
    return head(Endpoint.of(url), "POST", path, {name.replace("_", "-"): text for name, text in headers.items()}) + (
        b"content-length: %d\r\n\r\n" % len(body) + body
    )


def head(endpoint: Endpoint, method: str, path: str, headers: Mapping[str, str]) -> bytes:
    """The head of a request to `endpoint`, but for its length and the blank line after it."""
    lines = [
        f"{method} {endpoint.base_path}{path} HTTP/1.1",
        f"host: {endpoint.netloc}",
        "content-type: application/json",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join(lines).encode() + b"\r\n"


class Connection(asyncio.Protocol):
    """A connection that asks one thing at a time. Parser callbacks have httptools' names."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer = Answer()
        self._waiter: asyncio.Future[Answer] | None = None
        self._parser: Any = None
        self._read_at = 0.0

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def ask(self, *request: bytes | memoryview, keep: bool = False) -> asyncio.Future[Answer]:
        """The answer to the request whose bytes these are; a broken connection is an answer with status 0 or without
        an end.

        Args:
            keep: every read of the body, and the headers.
        """
        assert self._waiter is None and self._transport is not None, "one request at a time on an open connection"
        self._answer = Answer(sent=time.perf_counter(), kept=Kept() if keep else None)
        self._parser = httptools.HttpResponseParser(self)
        self._waiter = asyncio.get_running_loop().create_future()
        if len(request) == 1:
            self._transport.write(request[0])
        else:
            self._transport.writelines(request)
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
        if self._parser is None:  # nothing was asked
            self.close()
            return
        self._read_at = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._answer.garbage = self._answer.garbage or f"not HTTP ({error}): {data[:80]!r}"
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._settle()

    # httptools.HttpResponseParser

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._answer.kept is not None:
            self._answer.kept.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self._answer.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        answer = self._answer
        if not answer.first:
            answer.first = self._read_at
        answer.events += body.count(BLANK_LINE)
        answer.tail = body[-TAIL_BYTES:] if len(body) >= TAIL_BYTES else (answer.tail + body)[-TAIL_BYTES:]
        if answer.kept is not None:
            answer.kept.pieces.append((self._read_at, body))
            answer.kept.nbytes += len(body)
            if answer.kept.nbytes > KEPT_BYTES:
                answer.garbage = f"an answer of more than {KEPT_BYTES >> 20} MiB"
                self.close()

    def on_message_complete(self) -> None:
        self._answer.ended = self._read_at
        if not self._parser.should_keep_alive():
            self.close()
        self._settle()

    def _settle(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(self._answer)


async def connect(url: str | Endpoint, timeout_s: float = 5.0) -> Connection:
    """A connection to the server at `url`. Raises StageError when nobody answers there."""
    endpoint = url if isinstance(url, Endpoint) else Endpoint.of(url)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_s):
            _, connection = await loop.create_connection(
                Connection, endpoint.host, endpoint.port, ssl=ssl.create_default_context() if endpoint.tls else None
            )
    except TimeoutError as error:
        raise StageError(f"{endpoint} cannot be reached (no answer in {timeout_s:g} s)", stage=str(endpoint)) from error
    except OSError as error:
        raise StageError(f"{endpoint} cannot be reached ({error})", stage=str(endpoint)) from error
    return connection
