"""Who takes how many of the connections that wait, and when."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import pytest

from proxy.server.shared_listener import AT_ONCE, SharedListener
from tests.proxy.fakes import bound
from tests.waiting import until


class Held(asyncio.Protocol):
    """Notes that its connection has begun."""

    def __init__(self, held: set[asyncio.BaseProtocol]) -> None:
        self._held = held

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._held.add(self)


class Protocols:
    """Makes one for each connection, and keeps those that have begun."""

    def __init__(self) -> None:
        self.held: set[asyncio.BaseProtocol] = set()

    def __call__(self) -> asyncio.BaseProtocol:
        return Held(self.held)


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with bound() as made:
        made.listen(2 * AT_ONCE)
        yield made


def connected(listening: socket.socket, count: int) -> list[socket.socket]:
    return [socket.create_connection(listening.getsockname()) for _ in range(count)]


async def turns(count: int) -> None:
    """Of the event loop."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_one_that_is_alone_takes_all_that_wait_in_one_turn_of_a_busy_loop(listening: socket.socket) -> None:
    clients = connected(listening, AT_ONCE)
    listener, protocols = SharedListener(listening, lambda: None), Protocols()
    listener.start(protocols, protocols.held)
    await turns(2)
    assert listener.connections == AT_ONCE
    await until(lambda: len(protocols.held) == AT_ONCE)
    listener.stop()
    for client in clients:
        client.close()


@pytest.mark.parametrize(("least", "expected"), [(0, 1), (3, 4), (40, 8)])
async def test_beside_others_it_takes_one_more_than_the_least_busy_has_and_leaves_the_rest(
    listening: socket.socket, monkeypatch: pytest.MonkeyPatch, least: int, expected: int
) -> None:
    monkeypatch.setattr("proxy.server.shared_listener.POLITE_S", 1e6)
    clients = connected(listening, 8)
    listener, protocols = SharedListener(listening, lambda: least), Protocols()
    listener.start(protocols, protocols.held)
    await until(lambda: len(protocols.held) == expected)
    await turns(20)
    assert listener.connections == expected
    listener.stop()
    for client in clients:
        client.close()


async def test_what_nobody_else_takes_it_takes_after_a_moment(listening: socket.socket) -> None:
    clients = connected(listening, 8)
    listener, protocols = SharedListener(listening, lambda: 0), Protocols()
    listener.start(protocols, protocols.held)
    await until(lambda: len(protocols.held) == len(clients))
    listener.stop()
    for client in clients:
        client.close()
