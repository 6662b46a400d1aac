"""How a request learns that its client has left: the server says so."""

from __future__ import annotations

import asyncio

from proxy.server.http_protocol import EXTENSION, ClientDisconnect, disconnect_watch
from tests.waiting import PATIENCE_S


async def soon(event: asyncio.Event) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await event.wait()


async def test_our_server_says_so_itself_and_reads_on_for_it() -> None:
    noticed, reading = asyncio.Event(), asyncio.Event()
    disconnect = ClientDisconnect(reading.set)
    with disconnect_watch({"type": "http", "extensions": {EXTENSION: disconnect}}, noticed.set):
        assert reading.is_set() and not noticed.is_set()
        disconnect.lost()
        assert noticed.is_set()


async def test_who_had_left_before_is_heard_of_too() -> None:
    noticed = asyncio.Event()
    disconnect = ClientDisconnect(lambda: None)
    disconnect.lost()
    with disconnect_watch({"type": "http", "extensions": {EXTENSION: disconnect}}, noticed.set):
        await soon(noticed)


async def test_a_connection_that_is_lost_between_two_requests_concerns_neither() -> None:
    noticed = asyncio.Event()
    disconnect = ClientDisconnect(lambda: None)
    with disconnect_watch({"type": "http", "extensions": {EXTENSION: disconnect}}, noticed.set):
        pass
    disconnect.lost()
    await asyncio.sleep(0)
    assert not noticed.is_set()


async def test_a_request_that_ends_after_the_next_one_has_begun_does_not_silence_it() -> None:
    disconnect, noticed, of_the_first = ClientDisconnect(lambda: None), asyncio.Event(), asyncio.Event()
    scope = {"type": "http", "extensions": {EXTENSION: disconnect}}
    first, second = (disconnect_watch(scope, event.set) for event in (of_the_first, noticed))
    first.__enter__()
    with second:
        first.__exit__(None, None, None)
        disconnect.lost()
    assert noticed.is_set() and not of_the_first.is_set()


async def test_a_server_that_does_not_tell_is_served_all_the_same() -> None:
    noticed = asyncio.Event()
    with disconnect_watch({"type": "http"}, noticed.set):
        await asyncio.sleep(0)
    assert not noticed.is_set()
