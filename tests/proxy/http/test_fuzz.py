"""Whatever a client sends, made from our own OpenAPI document or by damaging good bodies: no 5xx, no hang, and answers
as the document says. The stages behind the proxy take everything, so every failure would be the proxy's."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

import pytest

from proxy.config.limits import MediaLimits
from proxy.request.parse import Endpoint
from tests.proxy.fakes import api_keys, cluster, encodes, settings
from tests.proxy.fuzzing import GOOD, OPERATIONS, TIMEOUT_S, fuzz_by_damage, fuzz_by_document

CONFIG = settings(
    api_keys=api_keys("fuzz-key"), media=MediaLimits(max_items=4, schemes=("data", "file")), max_body_bytes=1_000_000
)


@contextlib.contextmanager
def served_proxy() -> Iterator[str]:
    """The URL of a proxy in front of fake stages, in an event loop of its own."""
    ready, address = threading.Event(), []
    loop, over = asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        async with cluster("E0", "P0", "D0", "PD0", config=CONFIG) as c:
            c["E0"].usual = encodes()
            address.append(str(c.client.base_url))
            ready.set()
            await over.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    try:
        assert ready.wait(TIMEOUT_S), "the proxy did not start"
        yield address[0].rstrip("/")
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(TIMEOUT_S)
        loop.close()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served_proxy() as url:
        yield url


@pytest.mark.parametrize("name", OPERATIONS)
def test_requests_made_from_the_document_get_the_answers_it_promises(url: str, name: str) -> None:
    fuzz_by_document(url, name, examples=4)


@pytest.mark.parametrize("endpoint", list(GOOD))
def test_damaged_bodies_are_refused_in_openai_s_shape(url: str, endpoint: Endpoint) -> None:
    fuzz_by_damage(url, endpoint, examples=150)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
def test_many_requests_made_from_the_document(url: str, name: str) -> None:
    fuzz_by_document(url, name, examples=300)


@pytest.mark.slow
@pytest.mark.parametrize("endpoint", list(GOOD))
def test_many_damaged_bodies(url: str, endpoint: Endpoint) -> None:
    fuzz_by_damage(url, endpoint, examples=1000)
