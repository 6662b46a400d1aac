"""How a request learns that its client has left: on our server by a word, elsewhere by listening."""

from __future__ import annotations

import asyncio
from typing import Any

from proxy.server.http_protocol import EXTENSION, ClientDisconnect, DisconnectWatch
from tests.waiting import PATIENCE_S


class Client:
    """`receive` of an ASGI server that says nothing but that the client has left."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.noticed = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}


async def soon(event: asyncio.Event) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await event.wait()


async def test_without_our_server_it_is_heard_by_listening() -> None:
    client = Client()
    with DisconnectWatch({"type": "http"}, client.receive, client.noticed.set):
        client.left.set()
        await soon(client.noticed)


async def test_after_the_request_nobody_listens_any_more() -> None:
    client = Client()
    with DisconnectWatch({"type": "http"}, client.receive, client.noticed.set):
        await asyncio.sleep(0)
    client.left.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not client.noticed.is_set()


async def test_our_server_says_so_itself_and_reads_on_for_it() -> None:
    client, reading = Client(), asyncio.Event()
    disconnect = ClientDisconnect(reading.set)
    with DisconnectWatch({"type": "http", "extensions": {EXTENSION: disconnect}}, client.receive, client.noticed.set):
        assert reading.is_set() and not client.noticed.is_set()
        disconnect.lost()
        assert client.noticed.is_set()


async def test_who_had_left_before_is_heard_of_too() -> None:
    client = Client()
    disconnect = ClientDisconnect(lambda: None)
    disconnect.lost()
    with DisconnectWatch({"type": "http", "extensions": {EXTENSION: disconnect}}, client.receive, client.noticed.set):
        await soon(client.noticed)


async def test_a_connection_that_is_lost_between_two_requests_concerns_neither() -> None:
    client = Client()
    disconnect = ClientDisconnect(lambda: None)
    with DisconnectWatch({"type": "http", "extensions": {EXTENSION: disconnect}}, client.receive, client.noticed.set):
        pass
    disconnect.lost()
    await asyncio.sleep(0)
    assert not client.noticed.is_set()


async def test_a_request_that_ends_after_the_next_one_has_begun_does_not_silence_it() -> None:
    client, disconnect, of_the_first = Client(), ClientDisconnect(lambda: None), asyncio.Event()
    scope = {"type": "http", "extensions": {EXTENSION: disconnect}}
    first, second = (DisconnectWatch(scope, client.receive, noticed.set) for noticed in (of_the_first, client.noticed))
    first.__enter__()
    with second:
        first.__exit__(None, None, None)
        disconnect.lost()
    assert client.noticed.is_set() and not of_the_first.is_set()
