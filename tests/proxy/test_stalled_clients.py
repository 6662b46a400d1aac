"""A client that takes nothing loses its connection; one that takes little does not."""

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

from proxy.server import bind, serve
from proxy.stalled_clients import LOOKS, StalledClients
from tests.waiting import PATIENCE_S

PATIENCE = 60.0


class Wire:
    """A transport whose buffer is as long as `sizes` say, look by look."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = list(sizes)
        self.aborted = False
        self.transport: Any = self

    def get_write_buffer_size(self) -> int:
        return self.sizes.pop(0) if len(self.sizes) > 1 else self.sizes[0]

    def get_extra_info(self, _: str) -> None:
        return None

    def abort(self) -> None:
        self.aborted = True


def looked(wires: Sequence[Wire], *, looks: int) -> list[bool]:
    stalled = StalledClients(PATIENCE)
    for index in range(looks):
        stalled.look(wires, index * PATIENCE / LOOKS)
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
    stalled, wire = StalledClients(PATIENCE), Wire(3, 2, 1)
    for _ in range(100):
        stalled.look([wire], 1.0)
    assert len(wire.sizes) == 2


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
    listening = bind("127.0.0.1", 0)
    listening.listen()
    address = listening.getsockname()
    running = asyncio.create_task(serve(app, *address, sockets=[listening], grace_s=1.0, stall_s=0.2))
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
