"""What one client may take of the front door, and what is left for the others meanwhile."""

from __future__ import annotations

import asyncio
import gc
import threading
import tracemalloc
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from proxy.config.limits import BodyPace, MediaLimits, MemoryLimits
from proxy.config.settings import ProxySettings
from proxy.media.images import inspect_image
from proxy.tenants import MemoryReservation
from tests.proxy.fakes import Cluster, cluster, data_url, encodes, image_file, settings, text_body
from tests.waiting import PATIENCE_S, until

CHAT = "/v1/chat/completions"
TENANTS = {"tenant_header": "x-tenant"}


def by_url(*urls: str) -> dict[str, Any]:
    return text_body(
        messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": u}} for u in urls]}]
    )


class Host:
    """A media host: `/slow` sends a piece and then nothing until `released`, everything else an image."""

    def __init__(self) -> None:
        self.released = asyncio.Event()
        self.lookups = 0

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.lookups += 1
        if request.url.path == "/slow":
            return httpx.Response(200, stream=_Slow(self.released))
        if request.url.path == "/large":
            return httpx.Response(200, content=_many(b"x" * 1000, 100))
        return httpx.Response(200, stream=httpx.ByteStream(image_file()))


class _Slow(httpx.AsyncByteStream):
    def __init__(self, released: asyncio.Event) -> None:
        self._released = released

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b"x" * 500
        await self._released.wait()


async def _many(piece: bytes, count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield piece


async def resolver(_: str, __: int) -> Sequence[str]:
    return ["93.184.216.34"]


@asynccontextmanager
async def fetching(config: ProxySettings) -> AsyncIterator[tuple[Cluster, Host]]:
    host = Host()
    transport = httpx.MockTransport(host)
    async with cluster("E0", "P0", "D0", config=config, media_transport=transport, resolver=resolver) as c:
        c["E0"].usual = encodes()
        yield c, host
        await c.idle()
        assert c.pipeline.memory.held == 0, "everything was given back"


async def test_one_tenant_s_slow_urls_turn_away_nobody_else_s() -> None:
    limits = MediaLimits(max_parallel_fetches=8, fetch_timeout_s=PATIENCE_S, fetch_wait_s=0.1)
    async with fetching(settings(media=limits, **TENANTS)) as (c, host):
        slow = [
            asyncio.create_task(c.client.post(CHAT, json=by_url("http://h/slow"), headers={"x-tenant": "slow"}))
            for _ in range(8)
        ]
        await until(lambda: sum(task.done() for task in slow) == 4)
        for task in slow:
            if task.done():
                refused = task.result()
                assert refused.status_code == 503 and refused.headers["retry-after"]
                assert refused.json()["error"]["code"] == "fetches_full"
        other = await c.client.post(CHAT, json=by_url("http://h/a.png"), headers={"x-tenant": "other"})
        assert other.status_code == 200
        host.released.set()
        assert {(await task).status_code for task in slow} == {503, 400}  # what came at last is no image


async def test_only_the_fetch_is_timed_and_not_the_wait_for_it() -> None:
    limits = MediaLimits(max_parallel_fetches=1, fetch_timeout_s=0.3, fetch_wait_s=PATIENCE_S)
    async with fetching(settings(media=limits)) as (c, _):
        slow = asyncio.create_task(c.client.post(CHAT, json=by_url("http://h/slow")))
        after = [asyncio.create_task(c.client.post(CHAT, json=by_url("http://h/a.png"))) for _ in range(3)]
        assert (await slow).json()["error"]["code"] == "media_unreachable"
        assert [(await one).status_code for one in after] == [200] * 3


async def test_the_total_of_a_request_ends_the_fetching_and_not_only_the_request() -> None:
    limits = MediaLimits(max_bytes=200_000, max_total_bytes=150_000)
    async with fetching(settings(media=limits)) as (c, host):
        many = by_url(*["http://h/large"] * 2, *["http://h/slow"] * 2)
        async with asyncio.timeout(PATIENCE_S):  # the slow ones never end
            refused = await c.client.post(CHAT, json=many)
        assert refused.status_code == 413 and host.lookups == 4


async def test_media_that_do_not_fit_are_refused_while_they_come_and_leave_room_behind() -> None:
    limits = MediaLimits(max_bytes=200_000)
    async with fetching(settings(media=limits, memory=MemoryLimits(250_000))) as (c, host):
        slow = asyncio.create_task(c.client.post(CHAT, json=by_url(*["http://h/slow"] * 2)))
        with MemoryReservation(c.pipeline.memory, "another") as held:
            held.take(180_000)
            refused = await c.client.post(CHAT, json=by_url("http://h/large"))
            assert refused.status_code == 503 and refused.headers["retry-after"]
            assert refused.json()["error"]["code"] == "memory_full"
        host.released.set()
        await slow


async def test_what_a_refused_request_had_fetched_is_freed_with_its_answer() -> None:
    limits = MediaLimits(max_bytes=2_000_000, max_total_bytes=150_000)
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        async with fetching(settings(media=limits)) as (c, _):
            many = by_url(*["http://h/large"] * 2)
            assert (await c.client.post(CHAT, json=many)).status_code == 413  # first-time imports
            before = tracemalloc.get_traced_memory()[0]
            for _ in range(10):
                assert (await c.client.post(CHAT, json=many)).status_code == 413
            assert tracemalloc.get_traced_memory()[0] - before < 5 * 150_000
    finally:
        tracemalloc.stop()
        gc.enable()


async def test_a_thread_that_outlives_its_request_keeps_its_turn_and_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, released = threading.Event(), threading.Event()

    def slow(*args: Any, **more: Any) -> tuple[str, tuple[int, int]]:
        begun.set()
        assert released.wait(PATIENCE_S)
        return inspect_image(*args, **more)

    monkeypatch.setattr("proxy.media.loader.inspect_image", slow)
    async with fetching(settings(media=MediaLimits(threads=1))) as (c, _):
        asking = asyncio.create_task(c.client.post(CHAT, json=by_url("http://h/a.png")))
        await until(begun.is_set)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await c.idle()
        assert c.pipeline.memory.held > 0, "what the thread works with"
        with pytest.raises(TimeoutError):
            async with c.pipeline._media._turns.turn("other", within_s=0.0):
                pass
        released.set()
        await until(lambda: c.pipeline.memory.held == 0)
        assert (await c.client.post(CHAT, json=by_url("http://h/a.png"))).status_code == 200


async def test_a_request_holds_its_media_once_and_gives_them_back() -> None:
    large = image_file(200, 200)
    async with fetching(settings()) as (c, _):
        concurrent: list[int] = []

        async def look(*arguments: Any) -> None:
            concurrent.append(c.pipeline.memory.held)
            await encodes()(*arguments)

        c["E0"].usual = look
        url = data_url(large)
        assert (await c.client.post(CHAT, json=by_url(url))).status_code == 200
        assert len(url) <= concurrent[0] < len(url) + 3000
        assert (await c.client.post(CHAT, json=by_url("http://h/a.png"))).status_code == 200


@pytest.mark.parametrize(
    "pace", [BodyPace(grace_s=0.1), BodyPace(grace_s=PATIENCE_S, most_s=0.2)], ids=["rate", "time"]
)
async def test_a_slow_body_is_408_and_its_connection_is_closed(pace: BodyPace) -> None:
    async with cluster("PD0", config=settings(body_pace=pace)) as c:
        url = c.client.base_url
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10000\r\n\r\n")
        writer.write(b" " * 10)
        async with asyncio.timeout(PATIENCE_S):
            answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 408 ") and b"body_too_slow" in answer and b"connection: close" in answer
        writer.close()
        await c.idle()
        assert c.pipeline.memory.held == 0 and c.pipeline.arriving.held == 0


async def test_a_body_that_keeps_pace_may_take_longer_than_the_grace() -> None:
    pace = BodyPace(grace_s=0.3, bytes_per_s=1000)
    async with cluster("PD0", config=settings(body_pace=pace)) as c:

        async def body() -> AsyncIterator[bytes]:
            for _ in range(10):
                yield b" " * 400
                await asyncio.sleep(0.05)
            yield httpx.Request("POST", "http://x", json=text_body()).content

        assert (await c.client.post(CHAT, content=body())).status_code == 200


async def test_slow_bodies_of_one_tenant_leave_places_for_another() -> None:
    async with cluster("PD0", config=settings(max_in_flight=8, **TENANTS)) as c:
        url, writers = c.client.base_url, []
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-tenant: slow\r\ncontent-length: 10000\r\n\r\n"
        for _ in range(2):
            _, writer = await asyncio.open_connection(url.host, url.port)
            writer.write(head)
            writers.append(writer)
        await until(lambda: c.pipeline.arriving.held == 2)
        refused = await c.client.post(CHAT, json=text_body(), headers={"x-tenant": "slow"})
        assert refused.status_code == 429 and refused.headers["retry-after"]
        assert (await c.client.post(CHAT, json=text_body(), headers={"x-tenant": "other"})).status_code == 200
        for writer in writers:
            writer.close()
        await until(lambda: c.pipeline.arriving.held == 0)
