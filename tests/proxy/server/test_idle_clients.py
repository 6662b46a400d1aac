"""A client that does nothing loses its connection; one that does little does not."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.responses import StreamingResponse

from proxy.server.idle_clients import LOOKS, IdleClients, IdleTimeouts
from proxy.server.uvicorn_server import serve
from tests.proxy.fakes import bound
from tests.waiting import PATIENCE_S

TAKE_S = 60.0
IDLE_TIMEOUTS = IdleTimeouts(take_s=TAKE_S, head_s=TAKE_S, keep_alive_s=2 * TAKE_S)


class Wire:
    """A connection whose buffer is as long as `sizes` say, look by look."""

    heads = 0

    def __init__(self, *sizes: int, idle: bool = False, owes: bool = False) -> None:
        self.sizes = list(sizes)
        self.idle, self.owes = idle, owes
        self.aborted = self.closed = False
        self.transport: Any = self

    def get_write_buffer_size(self) -> int:
        return self.sizes.pop(0) if len(self.sizes) > 1 else self.sizes[0]

    def get_extra_info(self, _: str) -> None:
        return None

    def abort(self) -> None:
        self.aborted = True

    def close(self) -> None:
        self.closed = True


def looked(wires: Sequence[Wire], *, looks: int) -> list[bool]:
    stalled = IdleClients(IDLE_TIMEOUTS)
    for index in range(looks):
        stalled.look(wires, index * TAKE_S / LOOKS)
    return [wire.aborted for wire in wires]


def test_of_whom_nothing_is_taken_for_so_long_is_dropped_and_not_sooner() -> None:
    assert looked([Wire(5000)], looks=LOOKS) == [False]
    assert looked([Wire(5000)], looks=LOOKS + 1) == [True]


def test_who_takes_anything_has_all_the_time_again() -> None:
    slow = Wire(*[5000] * LOOKS, *[4999] * LOOKS, *[4998] * LOOKS)
    assert looked([slow, Wire(0)], looks=3 * LOOKS) == [False, False]


def test_an_empty_buffer_between_two_full_ones_was_taken() -> None:
    assert looked([Wire(*([7, 7, 0] * LOOKS))], looks=3 * LOOKS) == [False]


def test_a_look_before_its_time_looks_at_nobody() -> None:
    stalled, wire = IdleClients(IDLE_TIMEOUTS), Wire(3, 2, 1)
    for _ in range(100):
        stalled.look([wire], 1.0)
    assert len(wire.sizes) == 2


def test_whoever_does_not_get_to_a_request_is_closed_sooner_than_whoever_rests_between_two() -> None:
    idle = IdleClients(IDLE_TIMEOUTS)
    new, resting, busy = Wire(0, idle=True, owes=True), Wire(0, idle=True), Wire(0, owes=True)
    closed_at: dict[str, int] = {}
    for index in range(3 * LOOKS):
        idle.look([new, resting, busy], index * TAKE_S / LOOKS)
        closed_at |= {
            name: index for name, one in (("new", new), ("resting", resting)) if one.closed and name not in closed_at
        }
    assert closed_at == {"new": LOOKS, "resting": 2 * LOOKS} and not busy.closed


def test_whoever_completes_a_head_between_two_looks_has_all_the_time_again() -> None:
    idle, slow = IdleClients(IDLE_TIMEOUTS), Wire(0, idle=True, owes=True)
    for index in range(4 * LOOKS):
        slow.heads = index // (LOOKS - 1)
        idle.look([slow], index * TAKE_S / LOOKS)
    assert not slow.closed


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET /version HT",
        b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n\r\n",
    ],
    ids=["nothing", "half a head", "a request, and no more", "a request, and an empty line"],
)
async def test_a_connection_on_which_nothing_is_asked_is_closed(said: bytes) -> None:
    listening = bound()
    listening.listen()
    address = listening.getsockname()
    idle_timeouts = IdleTimeouts(head_s=0.2, keep_alive_s=0.4)
    running = asyncio.create_task(serve(FastAPI(), sockets=[listening], grace_s=1.0, idle_timeouts=idle_timeouts))
    try:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(said)
        async with asyncio.timeout(PATIENCE_S):
            await reader.read()
        writer.close()
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


def large_answers() -> tuple[FastAPI, asyncio.Event]:
    """An application that answers with more than any buffer takes, whole or as a stream, and the end of its stream."""
    app, ended = FastAPI(), asyncio.Event()
    piece = b"x" * (64 << 10)

    async def pieces() -> AsyncIterator[bytes]:
        try:
            while True:
                yield piece
                await asyncio.sleep(0)  # once the connection is gone, sending waits for nothing
        finally:
            ended.set()

    @app.get("/stream")
    async def stream() -> StreamingResponse:
        return StreamingResponse(pieces())

    @app.get("/whole")
    async def whole() -> StreamingResponse:
        return StreamingResponse(iter([piece * 256]))

    return app, ended


@pytest.mark.parametrize("path", ["/stream", "/whole"])
async def test_a_client_that_reads_nothing_is_gone_before_its_request_s_deadline(path: str) -> None:
    app, ended = large_answers()
    listening = bound()
    listening.listen()
    address = listening.getsockname()
    idle_timeouts = IdleTimeouts(take_s=0.2)
    running = asyncio.create_task(serve(app, sockets=[listening], grace_s=1.0, idle_timeouts=idle_timeouts))
    client = socket.socket()
    try:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, address)
        client.send(b"GET %s HTTP/1.1\r\nhost: x\r\n\r\n" % path.encode())
        async with asyncio.timeout(PATIENCE_S):
            while client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != errno.ECONNRESET:
                await asyncio.sleep(0.005)
            if path == "/stream":
                await ended.wait()
    finally:
        client.close()
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
