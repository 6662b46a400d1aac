"""The HTTP/1.1 of the request sender: one prepared request at a time per connection, answers read without copies.

Cheap on purpose: on a machine of two cores whatever the client costs is taken from what it measures. A request is bytes
made beforehand; a response is a status, its times and the end of its body, and for who asks every read of the body with
its time. Owns no schedule, and understands nothing of what it reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

from epd_serve.endpoint import connect as connect_stage
from epd_serve.endpoint import socket_path, unix_url
from epd_serve.errors import ConfigError, StageError

TAIL_BYTES = 1024
"""Of the end of a body that is always kept: it holds a whole error."""
KEPT_BYTES = 16 << 20
"""Of one body that is kept whole, at most: a server that never stops talking is not listened to any longer."""
CONNECT_S = 5.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One server. `base_path` comes before every path, and is mostly empty. `uds`: of a Unix socket, its path."""

    host: str
    port: int
    tls: bool = False
    base_path: str = ""
    uds: str = ""

    @classmethod
    def of(cls, url: str) -> Endpoint:
        """Reads `http://HOST:PORT`, with or without the `/v1` that clients write after it, or `unix:/PATH`.

        Raises:
            ConfigError: it is no such address.
        """
        if path := socket_path(url):
            return cls("localhost", 0, uds=path)
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{url!r}: {error}; give http://HOST:PORT", param="URL") from None
        if (
            parts.scheme not in ("http", "https")
            or not parts.hostname
            or parts.query
            or parts.fragment
            or parts.username
        ):
            raise ConfigError(f"{url!r} is no address of a server; give http://HOST:PORT alone", param="URL")
        tls = parts.scheme == "https"
        return cls(parts.hostname, port or (443 if tls else 80), tls, parts.path.rstrip("/").removesuffix("/v1"))

    @property
    def netloc(self) -> str:
        """Host and port as the header `host` has them."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """What paths are appended to; of a Unix socket, for a client that has its path."""
        return f"http{'s' if self.tls else ''}://{self.netloc}{self.base_path}"

    @property
    def local(self) -> bool:
        """It is on this machine, by its address."""
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return self.host in ("localhost", os.uname().nodename)

    def __str__(self) -> str:
        return unix_url(self.uds) if self.uds else self.url


@dataclass(slots=True)
class Response:
    """What came back. Times in seconds of CLOCK_MONOTONIC (`time.perf_counter`), 0 where there was none.

    Attributes:
        status: of HTTP; 0 where the connection broke first.
        sent_s: the request was written. first_byte_s: of the body. ended_s: end of the body.
        tail: the last `TAIL_BYTES` of the body.
        pieces: the body as it was read, each read with its time; None where that was not asked for.
        headers: names in lower case; kept with the pieces.
        garbage: what came was not HTTP, or too much of it.
    """

    status: int = 0
    sent_s: float = 0.0
    first_byte_s: float = 0.0
    ended_s: float = 0.0
    tail: bytes = field(default=b"", repr=False)
    pieces: list[tuple[float, bytes]] | None = field(default=None, repr=False)
    headers: dict[bytes, bytes] = field(default_factory=dict, repr=False)
    garbage: str = ""

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces or ())

    def whole(self, *, stream: bool) -> bool:
        """A complete answer by status and end alone; of a stream, with its [DONE]."""
        if self.status != 200 or not self.ended_s:
            return False
        return self.tail.endswith(b"data: [DONE]\n\n") if stream else self.tail.rstrip().endswith(b"}")


def head(endpoint: Endpoint, method: str, path: str, headers: Mapping[str, str]) -> bytes:
    """The head of a request to `endpoint`, but for its length and the blank line after it."""
    lines = [
        f"{method} {endpoint.base_path}{path} HTTP/1.1",
        f"host: {endpoint.netloc}",
        "content-type: application/json",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join(lines).encode() + b"\r\n"


def post(url: str, path: str, body: bytes, headers: Mapping[str, str] | None = None) -> bytes:
    """A POST of JSON to the server at `url`, ready to be written."""
    return head(Endpoint.of(url), "POST", path, headers or {}) + b"content-length: %d\r\n\r\n" % len(body) + body


class Connection(asyncio.Protocol):
    """A connection that carries one request at a time. Parser callbacks have httptools' names."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._response = Response()
        self._waiter: asyncio.Future[Response] | None = None
        self._parser: Any = None
        self._read_s = 0.0
        self._kept_bytes = 0

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def begun(self) -> bool:
        """The body of the response to the last request has begun."""
        return bool(self._response.first_byte_s)

    def send(self, *request: bytes | memoryview, keep: bool = False) -> asyncio.Future[Response]:
        """Writes a request; returns its response. A broken connection is one with status 0 or without an end.

        Args:
            keep: every read of the body, and the headers.
        """
        assert self._waiter is None and self._transport is not None, "one request at a time on an open connection"
        self._response = Response(sent_s=time.perf_counter(), pieces=[] if keep else None)
        self._parser, self._kept_bytes = httptools.HttpResponseParser(self), 0
        self._waiter = asyncio.get_running_loop().create_future()
        self._transport.writelines(request)
        return self._waiter

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
        self._read_s = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._response.garbage = self._response.garbage or f"not HTTP ({error}): {data[:80]!r}"
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._settle()

    # httptools.HttpResponseParser

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._response.pieces is not None:
            self._response.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self._response.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        response = self._response
        response.first_byte_s = response.first_byte_s or self._read_s
        response.tail = body[-TAIL_BYTES:] if len(body) >= TAIL_BYTES else (response.tail + body)[-TAIL_BYTES:]
        if response.pieces is not None:
            response.pieces.append((self._read_s, body))
            self._kept_bytes += len(body)
            if self._kept_bytes > KEPT_BYTES:
                response.garbage = f"an answer of more than {KEPT_BYTES >> 20} MiB"
                self.close()

    def on_message_complete(self) -> None:
        self._response.ended_s = self._read_s
        if not self._parser.should_keep_alive():
            self.close()
        self._settle()

    def _settle(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(self._response)


async def connect(url: str | Endpoint) -> Connection:
    """Connects to the server at `url`. Raises StageError when nobody answers there within `CONNECT_S`."""
    endpoint = url if isinstance(url, Endpoint) else Endpoint.of(url)
    tls = ssl.create_default_context() if endpoint.tls else None
    try:
        async with asyncio.timeout(CONNECT_S):
            if endpoint.uds:
                return (await connect_stage(str(endpoint), Connection))[1]
            loop = asyncio.get_running_loop()
            return (await loop.create_connection(Connection, endpoint.host, endpoint.port, ssl=tls))[1]
    except OSError as error:  # TimeoutError is one
        why = f"no answer in {CONNECT_S:g} s" if isinstance(error, TimeoutError) else str(error)
        raise StageError(f"{endpoint} cannot be reached ({why})", stage=str(endpoint)) from error


class Pool:
    """Connections to one server that are kept between requests, the one used last first.

    Args:
        idle_s: the server may be about to close one that lay unused for longer, so it is dropped.
    """

    def __init__(self, url: str | Endpoint, idle_s: float = 2.0) -> None:
        self._url, self._idle_s = url, idle_s
        self._idle: list[tuple[float, Connection]] = []

    async def take(self) -> Connection:
        """Returns a connection that nobody uses. Raises StageError where the server cannot be reached."""
        while self._idle:
            since_s, connection = self._idle.pop()
            if connection.usable and time.perf_counter() - since_s < self._idle_s:
                return connection
            connection.close()
        return await connect(self._url)

    def put_back(self, connection: Connection) -> None:
        if connection.usable:
            self._idle.append((time.perf_counter(), connection))

    def close(self) -> None:
        for _, connection in self._idle:
            connection.close()
        self._idle.clear()
