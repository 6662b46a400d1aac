"""Serving inside somebody else's event loop."""

from __future__ import annotations

import asyncio
import signal

import httpx
import pytest

from epd_serve.errors import ConfigError
from proxy.http.app import create_app
from proxy.registry.table import InstanceTable
from proxy.server.uvicorn_server import bind, serve
from tests.proxy.fakes import cluster, hangs, in_flight, served, settings, text_body
from tests.waiting import PATIENCE_S


def test_a_port_in_use_is_a_config_error_that_names_the_flag() -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(ConfigError, match=r"--port .* is in use") as refused:
            bind("127.0.0.1", taken.getsockname()[1])
        assert refused.value.param == "--port"
    with pytest.raises(ConfigError, match="--host"):
        bind("no-such-host.invalid", 0)


async def test_a_cancelled_server_leaves_signals_alone_ends_its_requests_and_frees_its_port() -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    async with cluster("PD0") as c:
        c["PD0"].script.append(hangs)
        table = InstanceTable()
        table.apply(c.instances["PD0"])
        listening = bind("127.0.0.1", 0)
        listening.listen()  # connections queue until the server runs
        port = listening.getsockname()[1]
        running = asyncio.create_task(
            serve(create_app(settings(), table), "127.0.0.1", port, sockets=[listening], grace_s=1.0)
        )
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
        bind("127.0.0.1", port).close()


async def test_a_socket_that_is_bound_but_not_served_yet_does_not_answer() -> None:
    listening = bind("127.0.0.1", 0)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", listening.getsockname()[1])
    listening.close()
    async with served(create_app(settings(), InstanceTable())) as url, httpx.AsyncClient(trust_env=False) as client:
        assert (await client.get(f"{url}/health")).status_code == 503
