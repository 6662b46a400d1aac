"""How a request learns that its client has left: on our server by a word, elsewhere by listening."""

from __future__ import annotations

import asyncio
from typing import Any

from proxy.server.client_disconnect import EXTENSION, Departure, Watching
from tests.waiting import PATIENCE_S


class Client:
    """`receive` of an ASGI server that says nothing but that the client has left."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.heard = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}


async def soon(event: asyncio.Event) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await event.wait()


async def test_without_our_server_it_is_heard_by_listening() -> None:
    client = Client()
    with Watching({"type": "http"}, client.receive, client.heard.set):
        client.left.set()
        await soon(client.heard)


async def test_after_the_request_nobody_listens_any_more() -> None:
    client = Client()
    with Watching({"type": "http"}, client.receive, client.heard.set):
        await asyncio.sleep(0)
    client.left.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not client.heard.is_set()


async def test_our_server_says_so_itself_and_reads_on_for_it() -> None:
    client, reading = Client(), asyncio.Event()
    departure = Departure(reading.set)
    with Watching({"type": "http", "extensions": {EXTENSION: departure}}, client.receive, client.heard.set):
        assert reading.is_set() and not client.heard.is_set()
        departure.lost()
        assert client.heard.is_set()


async def test_who_had_left_before_is_heard_of_too() -> None:
    client = Client()
    departure = Departure(lambda: None)
    departure.lost()
    with Watching({"type": "http", "extensions": {EXTENSION: departure}}, client.receive, client.heard.set):
        await soon(client.heard)


async def test_a_connection_that_is_lost_between_two_requests_concerns_neither() -> None:
    client = Client()
    departure = Departure(lambda: None)
    with Watching({"type": "http", "extensions": {EXTENSION: departure}}, client.receive, client.heard.set):
        pass
    departure.lost()
    await asyncio.sleep(0)
    assert not client.heard.is_set()


async def test_a_request_that_ends_after_the_next_one_has_begun_does_not_silence_it() -> None:
    client, departure, of_the_first = Client(), Departure(lambda: None), asyncio.Event()
    scope = {"type": "http", "extensions": {EXTENSION: departure}}
    first, second = (Watching(scope, client.receive, heard.set) for heard in (of_the_first, client.heard))
    first.__enter__()
    with second:
        first.__exit__(None, None, None)
        departure.lost()
    assert client.heard.is_set() and not of_the_first.is_set()
