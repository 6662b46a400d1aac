"""An OpenAI server whose answers and delays are known beforehand: what the sender's own figures are held against.

A request says in its field `known` how it is to be answered (`Known`); without one `usual` holds. Nothing is computed.
When each event was really written is kept by the request's `x-request-id`. `python -m bench.clients.known_server`
serves until its input ends (`bench/children.py`); its configuration may say what is `usual`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, cast

import httptools
import msgspec

from bench.children import answering, commands

MODEL = "known"
EARLY_S = 0.001
"""A first token is waited for by looking again and again from then on: timers count whole milliseconds."""
FAULTS = ("", "status", "garbage", "not http", "error event", "cut", "no done", "empty", "short", "hang", "drop")
_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_ROLE = b'{"object":"chat.completion.chunk","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}'
_TEXT = b'{"object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"word "},"finish_reason":null}]}'
_LAST = b'{"object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"end"},"finish_reason":"length"}]}'


class Known(msgspec.Struct, forbid_unknown_fields=True):
    """How a request is answered.

    Attributes:
        first_s: from the request's arrival to its first content. gap_s: between contents. tokens: how many.
        role_first: an event with the role alone is sent at once, which is no token.
        fault: one of `FAULTS`, after `fault_after` tokens where it breaks a stream. status: of the fault `status`.
    """

    first_s: float = 0.0
    gap_s: float = 0.0
    tokens: int = 4
    role_first: bool = False
    fault: str = ""
    fault_after: int = 1
    status: int = 429


class _Body(msgspec.Struct):
    known: Known | None = None


_decode = msgspec.json.Decoder(_Body).decode


class KnownServer:
    """`url` while it serves.

    Attributes:
        usual: how requests are answered that do not say. written: by request, when each content was written.
        seen: requests. longest_body: bytes of the longest.
        under_way: requests whose connection is open and whose answer has not ended.
        left: requests whose client closed its connection before their end.
    """

    def __init__(self, usual: Known | None = None) -> None:
        self.usual = usual or Known()
        self.url = ""
        self.written: dict[str, list[float]] = {}
        self.seen = 0
        self.longest_body = 0
        self.left = 0
        self.under_way = 0
        self._connections: set[_Connection] = set()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[KnownServer]:
        server = await asyncio.get_running_loop().create_server(lambda: _Connection(self), "127.0.0.1", 0, backlog=1024)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            self.die()

    def die(self) -> None:
        """Lose every connection, as a server does that is killed."""
        for connection in list(self._connections):
            connection.abort()


class _Connection(asyncio.Protocol):
    """One client. Parser callbacks have httptools' names."""

    def __init__(self, server: KnownServer) -> None:
        self._server = server
        self._parser: Any = httptools.HttpRequestParser(self)
        self._body: list[bytes] = []
        self._id = ""
        self._target = b""
        self._timer: asyncio.TimerHandle | None = None
        self._busy = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._server._connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._server._connections.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        if self._busy:
            self._server.under_way -= 1
            self._server.left += 1

    def data_received(self, data: bytes) -> None:
        self._at = time.perf_counter()
        self._parser.feed_data(data)

    def abort(self) -> None:
        self._transport.abort()

    def on_url(self, url: bytes) -> None:
        self._target = url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-request-id":
            self._id = value.decode()

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        body, self._body = b"".join(self._body), []
        if self._parser.get_method() == b"GET":
            self._whole(200, {"object": "list", "data": [{"id": MODEL, "object": "model"}]})
            return
        server = self._server
        server.seen += 1
        server.longest_body = max(server.longest_body, len(body))
        known = _decode(body).known or server.usual
        if known.fault == "status":
            self._whole(known.status, {"error": {"message": "too much to do", "type": "rate_limit_error"}})
        elif known.fault == "not http":
            self._transport.write(b"220 mail.example ESMTP\r\n")
        elif known.fault == "drop":
            self._transport.abort()
        else:
            server.under_way += 1
            self._busy = True
            server.written[self._id] = []
            if known.fault == "garbage":
                self._transport.write(_STREAM)
                self._end(_chunk(b"<html>It works!</html>\n\n"))
            elif known.fault != "hang":
                self._begin(known, server.written[self._id])

    def _begin(self, known: Known, written: list[float]) -> None:
        """Write what comes when it is due; what is due together goes together."""
        loop, origin = asyncio.get_running_loop(), self._at + known.first_s
        tokens = 0 if known.fault == "empty" else known.tokens - (known.fault == "short")
        self._transport.write(_STREAM + (_event(_ROLE) if known.role_first else b""))

        def step() -> None:
            now, out = time.perf_counter(), []
            while len(written) < tokens and origin + known.gap_s * len(written) <= now:
                if known.fault in ("cut", "error event") and len(written) == known.fault_after:
                    break
                out.append(_LAST if len(written) == tokens - 1 else _TEXT)
                written.append(now)
            payload = b"".join(map(_event, out))
            if known.fault in ("cut", "error event") and len(written) == known.fault_after:
                error = _event(b'{"error":{"message":"D0 died","type":"server_error"}}') + _event(b"[DONE]")
                self._transport.write(payload + (error if known.fault == "error event" else b""))
                self._finish()
                self._transport.close()
            elif len(written) == tokens:
                counted = {"prompt_tokens": 7, "completion_tokens": tokens, "total_tokens": 7 + tokens}
                payload += _event(json.dumps({"choices": [], "usage": counted}).encode())
                self._end(payload + (b"" if known.fault == "no done" else _event(b"[DONE]")))
            else:
                if payload:
                    self._transport.write(payload)
                due = origin + known.gap_s * len(written) - (0.0 if written else EARLY_S)
                self._timer = loop.call_later(max(0.0, due - time.perf_counter()), step)

        step()

    def _end(self, payload: bytes) -> None:
        self._transport.write(payload + b"0\r\n\r\n")
        self._finish()

    def _finish(self) -> None:
        self._busy = False
        self._server.under_way -= 1

    def _whole(self, status: int, body: dict[str, Any]) -> None:
        raw = json.dumps(body).encode()
        head = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\nretry-after: 1\r\n" % (
            status,
            HTTPStatus(status).phrase.encode(),
        )
        self._transport.write(head + b"content-length: %d\r\n\r\n" % len(raw) + raw)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _event(data: bytes) -> bytes:
    return _chunk(b"data: %b\n\n" % data)


def main() -> None:
    from deploy import event_loop

    event_loop.run(_serve())


async def _serve() -> None:
    answer = answering()
    lines = commands()
    usual = Known(**next(lines).get("usual", {}))
    async with KnownServer(usual).serving() as server:
        answer(url=server.url)
        while (order := await asyncio.to_thread(next, lines, None)) is not None:
            server.written.clear() if order.get("forget") else answer(written=server.written)


if __name__ == "__main__":
    main()
