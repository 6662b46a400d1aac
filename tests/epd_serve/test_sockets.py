"""Sockets over TCP are for members: whoever has not the deployment's key hears nothing and is not heard."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from epd_serve.errors import ConfigError
from epd_serve.key_files import derived_key
from epd_serve.sockets import Socket, bind, connect, open_socket, readable
from tests.waiting import PATIENCE_S

REFUSED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
ADDRESSES = ("tcp://127.0.0.1:*", "tcp://[::1]:*")


def key_at(path: Path) -> str:
    path.touch(mode=0o600)
    path.write_text(os.urandom(32).hex())
    return str(path)


@pytest.fixture
def key(tmp_path: Path) -> str:
    return key_at(tmp_path / "key")


@pytest.fixture
def opened() -> Iterator[Callable[[int], Socket]]:
    """Opens sockets that are closed at the end."""
    with contextlib.ExitStack() as stack:

        def open_one(kind: int) -> Socket:
            made = stack.enter_context(open_socket(kind))
            if kind == zmq.SUB:
                made.setsockopt(zmq.SUBSCRIBE, b"")
            return made

        yield open_one


def plain(made: Socket, address: str) -> None:
    made.setsockopt(zmq.IPV6, 1)
    made.connect(address)


def with_another_key(made: Socket, address: str) -> None:
    made.setsockopt(zmq.IPV6, 1)
    secret = z85.encode(derived_key("another-key-of-some-length", "epd-serve/curve-key/1"))
    public = zmq.curve_public(secret)
    made.curve_secretkey, made.curve_publickey, made.curve_serverkey = secret, public, public
    made.connect(address)


def without_the_servers_public_key(made: Socket, address: str) -> None:
    made.setsockopt(zmq.IPV6, 1)
    made.curve_publickey, made.curve_secretkey = zmq.curve_keypair()
    made.curve_serverkey = zmq.curve_keypair()[0]
    made.connect(address)


def event(monitor: Socket) -> int:
    assert monitor.poll(PATIENCE_S * 1000), "nothing has happened"
    return int(recv_monitor_message(monitor)["event"])


@pytest.mark.parametrize("address", ADDRESSES)
def test_members_talk_to_each_other(key: str, opened: Callable[[int], Socket], address: str) -> None:
    server, client = opened(zmq.ROUTER), opened(zmq.DEALER)
    bind(server, address, key)
    connect(client, server.last_endpoint.decode(), key)
    client.send(b"READY")
    name, said = server.recv_multipart()
    server.send_multipart([name, b"DONE"])
    assert (said, client.recv()) == (b"READY", b"DONE")


def test_a_member_is_found_by_its_host_name(key: str, opened: Callable[[int], Socket]) -> None:
    server, client = opened(zmq.ROUTER), opened(zmq.DEALER)
    bind(server, "tcp://127.0.0.1:*", key)
    connect(client, f"tcp://localhost:{server.last_endpoint.decode().rpartition(':')[2]}", key)
    client.send(b"READY")
    assert server.recv_multipart()[1] == b"READY"


@pytest.mark.parametrize("stranger_connects", [plain, with_another_key, without_the_servers_public_key])
def test_a_stranger_is_not_heard(
    key: str, opened: Callable[[int], Socket], stranger_connects: Callable[[Socket, str], None]
) -> None:
    server, stranger, member = opened(zmq.ROUTER), opened(zmq.DEALER), opened(zmq.DEALER)
    monitor = server.get_monitor_socket(REFUSED)
    bind(server, "tcp://127.0.0.1:*", key)
    address = server.last_endpoint.decode()
    stranger_connects(stranger, address)
    stranger.send(b"let me in")
    assert event(monitor) & REFUSED
    connect(member, address, key)
    member.send(b"READY")
    assert server.recv_multipart()[1] == b"READY" and not readable(server), "what came first was not let in"


@pytest.mark.parametrize("stranger_connects", [plain, with_another_key, without_the_servers_public_key])
def test_a_stranger_hears_nothing(
    key: str, opened: Callable[[int], Socket], stranger_connects: Callable[[Socket, str], None]
) -> None:
    server, stranger, member = opened(zmq.XPUB), opened(zmq.SUB), opened(zmq.SUB)
    monitor = server.get_monitor_socket(REFUSED)
    bind(server, "tcp://127.0.0.1:*", key)
    address = server.last_endpoint.decode()
    stranger_connects(stranger, address)
    assert event(monitor) & REFUSED
    connect(member, address, key)
    assert server.recv() == b"\x01", "the member's subscription"
    server.send(b"a feature is stored")
    assert member.recv() == b"a feature is stored"
    assert not readable(stranger)


def served_in_plain(made: Socket) -> None:
    made.bind("tcp://127.0.0.1:*")


def served_with_another_key(made: Socket) -> None:
    made.curve_publickey, made.curve_secretkey = zmq.curve_keypair()
    made.curve_server = True
    made.bind("tcp://127.0.0.1:*")


@pytest.mark.parametrize("served", [served_in_plain, served_with_another_key])
def test_a_member_says_nothing_to_a_server_that_is_none(
    key: str, opened: Callable[[int], Socket], served: Callable[[Socket], None]
) -> None:
    impostor, member = opened(zmq.ROUTER), opened(zmq.DEALER)
    served(impostor)
    monitor = member.get_monitor_socket(zmq.EVENT_DISCONNECTED | REFUSED)
    connect(member, impostor.last_endpoint.decode(), key)
    member.send(b"READY")
    event(monitor)
    assert not readable(impostor)


def test_one_socket_follows_addresses_of_both_kinds(key: str, opened: Callable[[int], Socket], tmp_path: Path) -> None:
    near, far, ear = opened(zmq.XPUB), opened(zmq.XPUB), opened(zmq.SUB)
    bind(near, f"ipc://{tmp_path}/E0.events")
    bind(far, "tcp://127.0.0.1:*", key)
    connect(ear, far.last_endpoint.decode(), key)
    connect(ear, f"ipc://{tmp_path}/E0.events", key)
    for publisher, said in ((near, b"near"), (far, b"far")):
        assert publisher.recv() == b"\x01"
        publisher.send(said)
        assert ear.recv() == said


@pytest.mark.parametrize("use", [bind, connect])
def test_a_tcp_port_without_a_key_is_refused(
    opened: Callable[[int], Socket], use: Callable[[Socket, str], None]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(ConfigError) as refused:
        use(opened(zmq.ROUTER), f"tcp://127.0.0.1:{port}")
    assert refused.value.param == "key_file"
    socket.create_server(("127.0.0.1", port)).close()  # nobody listens there


def test_a_key_that_cannot_be_used_is_named(opened: Callable[[int], Socket], tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("0123456789abcdef")
    path.chmod(0o644)
    with pytest.raises(ConfigError, match=str(path)):
        bind(opened(zmq.ROUTER), "tcp://127.0.0.1:*", str(path))
