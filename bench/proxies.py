"""How many encodes the proxies let through: concurrent duplicates of one picture over several proxies and encoders.

The proxies are the real application, several of them, each with its own table, in one event loop; the stages are fakes
that count (`bench/fake_stages.py`). With real stages: `epd-bench duplicates`.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from dataclasses import dataclass

import httpx

from bench.chat import body, picture
from bench.fake_stages import FakeStages
from epd_serve.errors import StageError
from proxy.config.settings import ModelIdentity, ProxySettings
from proxy.http.app import create_app
from proxy.registry.table import InstanceTable

MODEL = "bench"
ENCODE_S = 0.2  # longer than 64 requests take to arrive, so that all are duplicates of one that is under way
HEARD_S = 0.3  # for announcements to reach every proxy
LIMIT_S = 60.0


@dataclass(frozen=True)
class Encodes:
    """Encodes of one picture: for the duplicates, and for one more request per proxy once the feature is known."""

    for_duplicates: int
    for_known: int


def count_encodes(duplicates: int = 64, *, encoders: int = 2, proxies: int = 2, encode_s: float = ENCODE_S) -> Encodes:
    """Send them all at once, in turn to each proxy.

    Raises:
        StageError: a request was not answered with 200.
    """
    return asyncio.run(_count(duplicates, encoders, proxies, encode_s))


async def _count(duplicates: int, encoders: int, proxies: int, encode_s: float) -> Encodes:
    async with contextlib.AsyncExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="epd-bench-", dir="/tmp"))
        stages = FakeStages(encoders, encode_s=encode_s, events=scratch)
        stack.callback(stages.close)
        clients = []
        for _ in range(proxies):
            table = InstanceTable()
            for instance in stages.instances:
                table.apply(instance)
            app = create_app(
                ProxySettings((MODEL,), ModelIdentity(MODEL)), table, transport=stages.transport()
            )  # fmt: skip
            await stack.enter_async_context(app.router.lifespan_context(app))
            transport = httpx.ASGITransport(app)
            clients.append(
                await stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://proxy"))
            )
        await asyncio.sleep(HEARD_S)  # subscriptions take a moment, as at a real start
        request = {**body(MODEL, picture(1, 64)), "stream": False}

        async def send(client: httpx.AsyncClient) -> None:
            async with asyncio.timeout(LIMIT_S):
                answer = await client.post("/v1/chat/completions", json=request)
            if answer.status_code != 200:
                raise StageError(f"a duplicate was answered {answer.status_code}: {answer.text[:300]}", stage="proxy")

        await asyncio.gather(*(send(clients[turn % proxies]) for turn in range(duplicates)))
        for_duplicates = stages.encoded.total()
        await asyncio.sleep(HEARD_S)
        await asyncio.gather(*(send(client) for client in clients))
        return Encodes(for_duplicates, stages.encoded.total() - for_duplicates)
