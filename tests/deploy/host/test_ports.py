"""Ports that are held until somebody of ours listens there, and the address that goes with them."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest
import zmq

from deploy.host.ports import PortBlocks, address_of, free_ports
from epd_serve.errors import ConfigError

HOST = "127.0.0.9"  # nobody else's: the ranges below are as small as they are
LAST = 65_000


def blocks(count: int, within: int = 0) -> PortBlocks:
    """With room for so many ports."""
    return PortBlocks(HOST, range(LAST - (within or count), LAST))


def listens_at(host: str, port: int) -> socket.socket:
    """As every server of ours does."""
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_server_listens_on_a_port_that_is_held_and_nobody_else_finds_it_free(host: str) -> None:
    held, other = PortBlocks(host, range(20000, 20006)), PortBlocks(host, range(20000, 20006))
    first = held.take(6)
    with pytest.raises(ConfigError, match="no 1 free ports"):
        other.take(1)
    with pytest.raises(ConfigError, match="free ports"):
        free_ports(1, host, range(first, first + 6))
    with listens_at(host, first), zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.IPV6, ":" in host)
        router.bind(f"tcp://{f'[{host}]' if ':' in host else host}:{first + 1}")
        assert held.take_again(first, 6) == first, "it is ours all the time"
    held.give_back(first, 6)
    assert other.take(6) == first


def test_blocks_do_not_overlap() -> None:
    held = blocks(12)
    firsts = sorted(held.take(4) for _ in range(3))
    assert firsts == [LAST - 12, LAST - 8, LAST - 4]
    with pytest.raises(ConfigError):
        held.take(4)


def test_the_next_agent_has_the_ports_of_those_that_run_and_moves_those_whose_ports_somebody_took() -> None:
    before = blocks(4, within=8)
    running, waiting = before.take(4), before.take(4)
    with listens_at(HOST, running), listens_at(HOST, waiting):
        before.give_back(running, 4)
        before.give_back(waiting, 4)
        after = blocks(4, within=8)
        after.adopt(running, 4)
        with pytest.raises(ConfigError):
            after.take(4)  # of either block one port is listened on
        with pytest.raises(ConfigError):
            after.take_again(waiting, 4)
    assert after.take_again(running, 4) == running
    with listens_at(HOST, waiting):
        after.give_back(running, 4)
        assert after.take_again(waiting, 4) == running


def test_a_port_is_had_again_while_connections_of_the_last_life_linger() -> None:
    held = blocks(1)
    port = held.take(1)
    with listens_at(HOST, port) as server:
        client = socket.create_connection((HOST, port))
        accepted = server.accept()[0]
        accepted.close()  # first: its side lingers
        assert client.recv(1) == b""
        client.close()
    held.give_back(port, 1)
    with pytest.raises(ConfigError):
        blocks(1).take(1)
    assert blocks(1).take_again(port, 1) == port


@pytest.mark.parametrize(
    ("host", "address"),
    [("127.0.0.2", "127.0.0.2"), ("localhost", "127.0.0.1"), ("::1", "::1"), ("[::1]", "::1"), ("lo", "127.0.0.1")],
)
def test_what_others_connect_to_is_an_address(host: str, address: str) -> None:
    assert address_of(host, "--node-host") == address


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "no.such.host.invalid", "x" * 300])
def test_what_is_no_address_of_one_machine_is_refused(host: str) -> None:
    with pytest.raises(ConfigError) as refused:
        address_of(host, "--node-host")
    assert refused.value.param == "--node-host"


def test_an_interface_that_has_ipv6_alone_means_that_address_and_one_without_any_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def has(family: socket.AddressFamily, *addresses: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(family=family, address=address) for address in addresses]

    interfaces = {
        "rdma0": has(socket.AF_PACKET, "00:16:3e:00:00:01") + has(socket.AF_INET6, "fe80::fc00:ffff%rdma0", "fd00::2"),
        "both0": has(socket.AF_INET6, "fd00::3") + has(socket.AF_INET, "10.0.0.3"),
        "none0": has(socket.AF_PACKET, "00:16:3e:00:00:02"),
    }
    monkeypatch.setattr("psutil.net_if_addrs", lambda: interfaces)
    assert address_of("rdma0", "--node-host") == "fd00::2", "the one of its link is nobody's beyond it"
    assert address_of("both0", "--node-host") == "10.0.0.3"
    with pytest.raises(ConfigError, match="no address"):
        address_of("none0", "--node-host")
