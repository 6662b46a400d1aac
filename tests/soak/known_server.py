"""An OpenAI server whose answers and delays are known beforehand: what the sender's own figures are held against.

A request says in its field `known` how it is to be answered (`Known`); without one `usual` holds. Nothing is computed.
When each event was really written is kept by the request's `x-request-id`. As a `Child` it is told what is usual.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from multiprocessing.connection import Connection as Pipe
from typing import Any, cast

import httptools
import msgspec

from deploy.host import event_loop

MODEL = "known"
EARLY_S = 0.001
"""A first token is waited for by looking again and again from then on: timers count whole milliseconds."""
_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_ROLE = b'{"object":"chat.completion.chunk","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}'
_TEXT = b'{"object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"word "},"finish_reason":null}]}'
_END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
_LAST = b'{"object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"end"},"finish_reason":"length"}]}'


class Known(msgspec.Struct, forbid_unknown_fields=True):
    """How a request is answered.

    Attributes:
        first_s: from the request's arrival to its first content. gap_s: between contents. tokens: how many.
        role_first: an event with the role alone is sent at once, which is no token.
    """

    first_s: float = 0.0
    gap_s: float = 0.0
    tokens: int = 4
    role_first: bool = False


class KnownServer:
    """`url` while it serves.

    Attributes:
        usual: how requests are answered that do not say. written: by request, when each content was written.
    """

    def __init__(self, usual: Known | None = None) -> None:
        self.usual = usual or Known()
        self.url = ""
        self.written: dict[str, list[float]] = {}

    def connection(self) -> Connection:
        """One client's."""
        return Connection(self)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[KnownServer]:
        server = await asyncio.get_running_loop().create_server(self.connection, "127.0.0.1", 0, backlog=1024)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()


class Connection(asyncio.Protocol):
    """One client. Parser callbacks have httptools' names."""

    def __init__(self, server: KnownServer) -> None:
        self.server = server
        self.known = Known()
        self.written: list[float] = []
        self._parser: Any = httptools.HttpRequestParser(self)
        self._body: list[bytes] = []
        self._id = ""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._at_s = time.perf_counter()
        self._parser.feed_data(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-request-id":
            self._id = value.decode()

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        body, self._body = b"".join(self._body), []
        if self._parser.get_method() == b"GET":
            self.whole(200, {"object": "list", "data": [{"id": MODEL, "object": "model"}]})
            return
        asked, usual = msgspec.json.decode(body).get("known"), self.server.usual
        self.known = usual if asked is None else msgspec.convert(asked, type(usual))
        self.written = self.server.written[self._id] = []
        self.answer(body)

    def answer(self, body: bytes) -> None:
        """Begin to answer the request that has `body` as `known` says."""
        self.transport.write(_STREAM + (event(_ROLE) if self.known.role_first else b""))
        self.step()

    def step(self) -> None:
        """Write what is due; what is due together goes together."""
        known, written = self.known, self.written
        begun_s, now, out = self._at_s + known.first_s, time.perf_counter(), b""
        while len(written) < known.tokens and begun_s + known.gap_s * len(written) <= now:
            out += event(_LAST if len(written) == known.tokens - 1 else _TEXT)
            written.append(now)
        if len(written) == known.tokens:
            self.finish(out)
            return
        if out:
            self.transport.write(out)
        due_s = begun_s + known.gap_s * len(written) - (0.0 if written else EARLY_S)
        self._timer = asyncio.get_running_loop().call_later(max(0.0, due_s - time.perf_counter()), self.step)

    def finish(self, out: bytes, end: bytes = _END) -> None:
        """Write the last content, and what comes after it."""
        tokens = len(self.written)
        counted = {"prompt_tokens": 7, "completion_tokens": tokens, "total_tokens": 7 + tokens}
        self.transport.write(out + event(json.dumps({"choices": [], "usage": counted}).encode()) + end)

    def whole(self, status: int, body: dict[str, Any]) -> None:
        """Answer with JSON."""
        raw = json.dumps(body).encode()
        reason = HTTPStatus(status).phrase
        head = f"HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
        self.transport.write(head.encode() + raw)


def event(data: bytes) -> bytes:
    """A chunk that holds an event."""
    return b"%x\r\ndata: %b\n\n\r\n" % (len(data) + 8, data)


def main(pipe: Pipe, usual: Known | None = None) -> None:
    """In the process: tell the URL, and when asked what was written since last asked."""
    event_loop.run(_serve(pipe, usual))


async def _serve(pipe: Pipe, usual: Known | None) -> None:
    async with KnownServer(usual).serving() as server:
        pipe.send(server.url)
        while await asyncio.to_thread(pipe.recv) is not None:
            pipe.send(server.written)
            server.written = {}
