"""Who has not the deployment's key gets nothing from any port that it opens on any node.

Tried from outside: every port that a process of a node listens on, with what an attacker has, which is the address. Not
Mooncake's, which ask nobody (docs/guides/security.md): simulated stages have none.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import ssl
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import zmq

from deploy.host.ports import listeners
from tests.deploy.ray.deployed import Deployed, deployed_on, load
from tests.deploy.ray.nodes import RayNodes
from tests.deploy.ray.on_ray import LAYOUT

pytestmark = pytest.mark.slow
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)  # ZMTP 3.0
LISTEN_S = 2.0
PATHS = ("/v1/models", "/metrics", "/version", "/instances", "/deployment", "/openapi.json", "/ping", "/load")
BODIES = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/invocations", "/deployment/layout", "/pause")
FORGED = zmq.curve_keypair()[0]
GARBAGE = (os.urandom(65536), GREETING + os.urandom(65536), b"\xff" * 65536, b"POST / HTTP/1.1\r\n" * 999)


@dataclass(frozen=True)
class Port:
    """`speaks`: a ZMTP mechanism, `http`, `https`, or "" for something else."""

    address: str
    port: int
    speaks: str


@pytest.fixture(scope="module")
def deployed(cluster: RayNodes) -> Iterator[Deployed]:
    with deployed_on(cluster, LAYOUT) as found:
        yield found


@pytest.fixture(scope="module")
def ports(deployed: Deployed) -> list[Port]:
    """Of all processes on all nodes, but that of the clients."""
    clients = urlsplit(deployed.launch.url).port
    found = {(one.address, one.port) for one in listeners(deployed.processes()) if one.port != clients}
    return [Port(address, port, speaks(address, port)) for address, port in sorted(found)]


def speaks(address: str, port: int) -> str:
    said = answered(address, port, GREETING[:12])  # the other end says its own before it has heard all of ours
    if said[:1] == b"\xff" and len(said) >= 32:
        return said[12:32].rstrip(b"\0").decode()
    if answered(address, port, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").startswith(b"HTTP/1.1"):
        return "http"
    with contextlib.suppress(OSError):
        ssl.get_server_certificate((address, port), timeout=LISTEN_S)
        return "https"
    return ""


def answered(address: str, port: int, said: bytes) -> bytes:
    """What comes back until the other end has said 64 bytes, closes, or is silent."""
    got = b""
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=LISTEN_S) as connection:
        connection.sendall(said)
        while len(got) < 64 and (more := connection.recv(4096)):
            got += more
    return got


def test_every_port_speaks_http_or_zmtp_with_curve(ports: list[Port]) -> None:
    assert {one.speaks for one in ports} == {"http", "https", "CURVE"}, ports
    assert sum(one.speaks == "http" for one in ports) >= 12, "of every stage"
    assert sum(one.speaks == "https" for one in ports) >= 3, "of every node"


def test_http_without_the_key_says_that_it_lives_and_nothing_else(ports: list[Port]) -> None:
    for one in (each for each in ports if each.speaks in ("http", "https")):
        for key in ("", "0" * 64):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            url = f"{one.speaks}://{one.address}:{one.port}"
            with httpx.Client(base_url=url, headers=headers, trust_env=False, verify=False) as http:
                refused = [http.get(path).status_code for path in PATHS]
                refused += [http.post(path, json={"model": "m", "prompt": "hi"}).status_code for path in BODIES]
                assert set(refused) <= {401, 404}, (one, refused)
                assert 401 in refused, one
                assert len(http.get("/health").content) < 64


@pytest.mark.parametrize("curve", [False, True], ids=["plain", "with a key of one's own"])
def test_zmq_without_the_key_hears_nothing_while_the_deployment_works(
    deployed: Deployed, ports: list[Port], curve: bool
) -> None:
    context = zmq.Context()
    poller = zmq.Poller()
    try:
        for one in (each for each in ports if each.speaks == "CURVE"):
            for kind in (zmq.SUB, zmq.PULL, zmq.DEALER, zmq.REQ):
                mine = context.socket(kind)
                mine.linger = 0
                if curve:
                    mine.curve_publickey, mine.curve_secretkey = zmq.curve_keypair()
                    mine.curve_serverkey = FORGED
                if kind == zmq.SUB:
                    mine.subscribe(b"")
                mine.connect(f"tcp://{one.address}:{one.port}")
                if kind in (zmq.DEALER, zmq.REQ):
                    mine.send(b"\x93\x01\x02\x03", zmq.NOBLOCK)
                poller.register(mine, zmq.POLLIN)
        with load(deployed) as found:
            assert poller.poll(5000 * LISTEN_S) == [], "somebody said something"
        assert (found.errors, found.cut) == ([], [])
    finally:
        context.destroy(0)


def test_garbage_at_every_port_disturbs_nobody(deployed: Deployed, ports: list[Port]) -> None:
    before = deployed.lives
    with load(deployed) as found:
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda case: answered(case[0].address, case[0].port, case[1]), product(ports, GARBAGE)))
    assert (found.errors, found.cut) == ([], [])
    assert deployed.lives == before


def test_the_key_is_for_this_user_alone_and_on_no_command_line(deployed: Deployed) -> None:
    runs = [path for path in deployed.launch.run.iterdir() if path.is_dir()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in runs} == {0o700}
    keys = {
        path.read_text().strip(): stat.S_IMODE(path.stat().st_mode)
        for run in runs
        for path in run.iterdir()
        if path.is_file() and re.fullmatch(rb"[0-9a-f]{64}\n?", path.read_bytes()[:66])
    }
    assert keys and set(keys.values()) == {0o600}
    for pid in deployed.processes():
        for name in ("cmdline", "environ"):
            said = Path(f"/proc/{pid}/{name}").read_bytes()
            assert not [key for key in keys if key.encode() in said], (pid, name)
