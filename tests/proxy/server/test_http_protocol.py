"""What a client may send before its request has a head."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable

import pytest
from starlette.types import Receive, Scope, Send

from proxy.http.app import create_app
from proxy.registry.table import InstanceTable
from proxy.server.http_protocol import BODY_IS_HERE, MAX_HEAD_BYTES
from proxy.server.uvicorn_server import serve
from tests.proxy.fakes import bound, settings
from tests.waiting import PATIENCE_S

PIECE = b"a" * 8192
CHUNKED = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[int]:
    """The port of a proxy without stages, on the server that the product uses."""
    listening = bound()
    listening.listen()
    port: int = listening.getsockname()[1]
    app = create_app(settings(), InstanceTable())
    running = asyncio.create_task(serve(app, sockets=[listening], grace_s=1.0))
    try:
        yield port
    finally:
        running.cancel()
        await asyncio.wait([running])


async def exchange(port: int, pieces: Iterable[bytes]) -> tuple[int, bytes]:
    """(bytes that were taken, what came back) until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    sent = 0
    with contextlib.suppress(ConnectionError):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            sent += len(piece)
            if reader.at_eof():
                break
    answer = b""
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(5):
            answer = await reader.read()
    writer.close()
    return sent, answer


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"GET /health HTTP/1.1\r\nhost: x\r\nx: ", PIECE),
        (b"GET /health HTTP/1.1\r\nhost: x\r\n", b"x: " + PIECE + b"\r\n"),
        (CHUNKED + b"0\r\nx: ", PIECE),
    ],
    ids=["a header", "headers", "a trailer"],
)
async def test_one_that_does_not_end_is_refused(begin: bytes, piece: bytes) -> None:
    async with serving() as port:
        sent, _ = await exchange(port, [begin, *[piece] * 4096])
        assert sent < 16 << 20, "it took all of it"


async def test_a_refusal_says_why() -> None:
    async with serving() as port:
        # As much as makes it too large, since a reset for what nobody reads may overtake the answer.
        _, answer = await exchange(port, [b"GET / HTTP/1.1\r\nx: " + b"a" * (MAX_HEAD_BYTES - 18)])
        assert answer.startswith(b"HTTP/1.1 400 ") and b"65,536 bytes" in answer


async def test_bodies_and_many_requests_on_one_connection_are_no_heads() -> None:
    async with serving() as port:
        body = b"[" + b" " * (4 * MAX_HEAD_BYTES) + b"]"
        post = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
        whole = post + b"content-length: %d\r\n\r\n" % len(body) + body
        chunked = CHUNKED + (b"%x\r\n" % len(PIECE) + PIECE + b"\r\n") * 40 + b"0\r\n\r\n"
        get = b"GET /version HTTP/1.1\r\nhost: x\r\nx: " + PIECE + b"\r\n\r\n"
        last = b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        _, answer = await exchange(port, [whole, chunked, *[get] * 20, last])
        assert answer.count(b"HTTP/1.1 400 ") == 2 and answer.count(b"invalid_json") == 2
        assert answer.count(b"HTTP/1.1 200 ") == 21


async def test_a_request_is_told_whether_its_body_is_here() -> None:
    told: list[tuple[bool, bool]] = []

    async def listens(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            before = BODY_IS_HERE in scope["extensions"]
            while (await receive())["more_body"]:
                arriving.set()
            told.append((before, BODY_IS_HERE in scope["extensions"]))
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body"})

    arriving = asyncio.Event()
    listening = bound()
    listening.listen()
    running = asyncio.create_task(serve(listens, sockets=[listening], grace_s=0.0))  # type: ignore[arg-type]
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", listening.getsockname()[1])
        async with asyncio.timeout(PATIENCE_S):
            writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}")
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{")
            await arriving.wait()
            writer.write(b"}")
            await reader.readuntil(b"\r\n\r\n")
        writer.close()
    finally:
        running.cancel()
        await asyncio.wait([running])
    assert told == [(True, True), (False, True)]


class _Reads(asyncio.Protocol):
    """Keeps what came, read by read."""

    def __init__(self) -> None:
        self.reads: list[bytes] = []
        self.closed = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.reads.append(data)

    def connection_lost(self, error: Exception | None) -> None:
        self.closed.set_result(None)


async def test_an_answer_and_its_head_are_one_packet() -> None:
    async with serving() as port:
        transport, client = await asyncio.get_running_loop().create_connection(_Reads, "127.0.0.1", port)
        transport.write(b"GET /live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        async with asyncio.timeout(5):
            await client.closed
        (answer,) = client.reads
        assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b'{"status":"alive"}')


async def test_a_head_that_nothing_follows_is_sent_all_the_same() -> None:
    async def begins(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await asyncio.sleep(PATIENCE_S)

    listening = bound()
    listening.listen()
    port: int = listening.getsockname()[1]
    running = asyncio.create_task(serve(begins, sockets=[listening], grace_s=0.0))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    async with asyncio.timeout(5):
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    writer.close()
    running.cancel()
    await asyncio.wait([running])
