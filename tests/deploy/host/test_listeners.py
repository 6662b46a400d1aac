"""What listens where, read from /proc and tried out."""

from __future__ import annotations

import os
import socket

import pytest

from deploy.host.ports import exposed, exposure_warnings, listeners, other_address
from store.addresses import narrow


def test_the_listeners_of_a_process_are_found_with_their_addresses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("0.0.0.0", 0)) as two:
        found = {each.port: each for each in listeners([os.getpid()])}
        assert found[one.getsockname()[1]].address == "127.0.0.1"
        assert found[two.getsockname()[1]].everywhere
    assert listeners([2**22 + 1]) == []


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_ipv6_addresses_are_read_too() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as one:
        (found,) = [each for each in listeners([os.getpid()]) if each.port == one.getsockname()[1]]
        assert found.address == "::1"


async def test_a_port_bound_everywhere_is_exposed_until_it_is_narrowed() -> None:
    with socket.create_server(("0.0.0.0", 0)) as wide, socket.create_server(("127.0.0.1", 0)):
        port = wide.getsockname()[1]
        assert [one.port for one in await exposed([os.getpid()], "127.0.0.1")] == [port]
        (line,) = await exposure_warnings({"E0": os.getpgrp()}, "127.0.0.1")
        assert f"port {port} of E0" in line
        narrow(wide, "127.0.0.1")
        assert await exposed([os.getpid()], "127.0.0.1") == []


async def test_stages_that_are_meant_for_every_address_are_not_warned_of() -> None:
    with socket.create_server(("0.0.0.0", 0)):
        assert await exposed([os.getpid()], "0.0.0.0") == []


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "192.0.2.9"])
def test_the_address_to_try_is_another_one(address: str) -> None:
    assert other_address(address) != address
