"""Who takes how many of the connections that wait, and when."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.server.shared_listener import AT_ONCE, FILES_PER_CONNECTION, FULL_S, SharedListener
from proxy.server.tls import Certificate
from tests.certificates import certificate
from tests.proxy.fakes import bound
from tests.waiting import until


class Held(asyncio.Protocol):
    """Notes that its connection has begun, and that it has ended."""

    idle = owes = False
    transport: asyncio.Transport

    def __init__(self, held: set[asyncio.BaseProtocol]) -> None:
        self._held = held

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._held.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._held.discard(self)


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


async def test_one_that_has_as_many_as_it_may_leaves_the_rest_until_one_ends(listening: socket.socket) -> None:
    clients = connected(listening, 6)
    listener, protocols = SharedListener(listening, lambda: None, most=4), Protocols()
    listener.start(protocols, protocols.held)
    await until(lambda: len(protocols.held) == 4)
    await turns(20)
    assert listener.connections == 4
    first = next(one for one in protocols.held if isinstance(one, Held))
    first.transport.close()
    await until(lambda: first not in protocols.held and len(protocols.held) == 4)
    listener.stop()
    for client in clients:
        client.close()


async def test_where_there_is_no_room_a_connection_on_which_nothing_is_asked_makes_some(
    listening: socket.socket,
) -> None:
    listener, protocols = SharedListener(listening, lambda: None, most=4), Protocols()
    listener.start(protocols, protocols.held)
    clients = connected(listening, 4)
    await until(lambda: len(protocols.held) == 4)
    idle = next(one for one in protocols.held if isinstance(one, Held))
    idle.idle = True
    clients += connected(listening, 2)
    await until(lambda: idle not in protocols.held and len(protocols.held) == 4)
    await turns(20)
    assert listener.connections == 4, "the last one waits: the others are busy"
    listener.stop()
    for client in clients:
        client.close()


async def test_over_tls_no_second_connection_is_ended_while_the_client_of_the_first_does_nothing(
    listening: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert_file, key_file = certificate(tmp_path)
    paused: list[float] = []
    monkeypatch.setattr(SharedListener, "_pause", lambda self, pause_s: paused.append(pause_s))
    listener, protocols = SharedListener(listening, lambda: None, Certificate(cert_file, key_file), most=3), Protocols()
    listener.start(protocols, protocols.held)
    trusting = ssl.create_default_context(cafile=cert_file)
    clients = [
        await asyncio.to_thread(trusting.wrap_socket, client, server_hostname="127.0.0.1")
        for client in connected(listening, 3)
    ]
    await until(lambda: len(protocols.held) == 3)
    for one in protocols.held:
        assert isinstance(one, Held)
        one.idle = True
    clients += connected(listening, 1)
    await until(lambda: len(paused) > 2)
    ending = [one for one in protocols.held if isinstance(one, Held) and one.transport.is_closing()]
    assert (len(protocols.held), len(ending)) == (3, 1) and set(paused) == {FULL_S}
    listener.stop()
    for client in clients:
        client.close()


async def test_a_full_one_ends_no_connection_while_another_process_has_room(
    listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused: list[float] = []
    monkeypatch.setattr(SharedListener, "_pause", lambda self, pause_s: paused.append(pause_s))
    listener, protocols = SharedListener(listening, lambda: 1, most=2), Protocols()
    listener.start(protocols, protocols.held)
    clients = connected(listening, 2)
    await until(lambda: len(protocols.held) == 2)
    for one in protocols.held:
        assert isinstance(one, Held)
        one.idle = True
    clients += connected(listening, 1)
    await until(lambda: paused)
    assert len(protocols.held) == 2
    listener.stop()
    for client in clients:
        client.close()


def test_a_process_opens_all_files_that_it_may_and_takes_a_part_of_them_for_clients() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 400));"
        "from proxy.server.shared_listener import most_connections;"
        "print(most_connections(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(400 // FILES_PER_CONNECTION), "400"]
