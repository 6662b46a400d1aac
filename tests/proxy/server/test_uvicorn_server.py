"""Serving inside somebody else's event loop."""

from __future__ import annotations

import asyncio
import signal
import socket

import httpx
import pytest

from proxy.http.app import create_app
from proxy.registry.table import InstanceTable
from proxy.server.uvicorn_server import serve
from tests.proxy.fakes import bound, cluster, hangs, in_flight, settings, text_body
from tests.waiting import PATIENCE_S


async def test_a_cancelled_server_leaves_signals_alone_ends_its_requests_and_frees_its_port() -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    async with cluster("PD0") as c:
        c["PD0"].script.append(hangs)
        table = InstanceTable()
        table.apply(c.instances["PD0"])
        listening = bound()
        listening.listen()  # connections queue until the server runs
        port = listening.getsockname()[1]
        running = asyncio.create_task(serve(create_app(settings(), table), sockets=[listening], grace_s=1.0))
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S, trust_env=False
        ) as client:
            request = asyncio.create_task(client.post("/v1/chat/completions", json=text_body()))
            await c["PD0"].until(lambda stage: stage.active == 1)
            assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            await c["PD0"].until(lambda stage: stage.cancelled == 1)
            assert in_flight(table) == 0
            request.cancel()
            await asyncio.wait([request])
        socket.create_server(("127.0.0.1", port)).close()
