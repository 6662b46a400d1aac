"""Ports that are bound to every address answer at one address only."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading

import pytest

from store.addresses import destination_filter, narrow, narrow_port, reachable_only_at

SIZE = 3_000_000


def listening(family: socket.AddressFamily = socket.AF_INET) -> socket.socket:
    made = socket.socket(family)
    if family is socket.AF_INET6:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    made.bind(("", 0))
    made.listen(5)
    return made


def answers(address: str, port: int) -> bool:
    with socket.socket() as client:
        client.settimeout(0.3)
        with contextlib.suppress(OSError):
            client.connect((address, port))
            return True
    return False


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_port_opened_inside_answers_at_the_chosen_address_only(family: socket.AddressFamily) -> None:
    with listening() as earlier:
        with reachable_only_at("127.0.0.2"):
            inside = listening(family)
        with inside:
            port = inside.getsockname()[1]
            assert answers("127.0.0.2", port)
            assert not answers("127.0.0.1", port)
            assert answers("127.0.0.1", earlier.getsockname()[1]), "what listened before is left alone"


def test_one_port_is_narrowed_and_its_neighbours_are_not() -> None:
    with listening(socket.AF_INET6) as one, listening() as other:
        assert narrow_port("127.0.0.2", one.getsockname()[1])
        assert answers("127.0.0.2", one.getsockname()[1])
        assert not answers("127.0.0.1", one.getsockname()[1])
        assert answers("127.0.0.1", other.getsockname()[1])


def test_a_port_of_nobody_is_not_narrowed() -> None:
    with listening() as closed:
        port = closed.getsockname()[1]
    assert not narrow_port("127.0.0.1", port)


def test_the_unspecified_address_changes_nothing() -> None:
    with reachable_only_at("0.0.0.0"):
        inside = listening()
    with inside:
        assert answers("127.0.0.1", inside.getsockname()[1])


def test_data_passes_unharmed_through_a_filtered_port() -> None:
    with listening() as server:
        narrow(server, "127.0.0.1")

        def serve() -> None:
            accepted, _ = server.accept()
            with accepted:
                accepted.sendall(bytes(SIZE))

        serving = threading.Thread(target=serve, daemon=True)
        serving.start()
        with socket.create_connection(("127.0.0.1", server.getsockname()[1]), timeout=30) as client:
            received = 0
            while chunk := client.recv(1 << 16):
                received += len(chunk)
        serving.join(30)
        assert received == SIZE


def test_every_failed_check_falls_into_a_drop() -> None:
    for address in ("10.1.2.3", "fd00::5"):
        program = destination_filter(address)
        checks = [at for at, (code, *_) in enumerate(program) if code == 0x15]
        assert len(checks) == (2 if "." in address else 5)
        for at in checks:
            assert program[at][1:3] == (1, 0) and program[at + 1] == (0x06, 0, 0, 0)
        assert program[-1] == (0x06, 0, 0, 0xFFFFFFFF)


@pytest.mark.mooncake
def test_mooncakes_ports_answer_at_the_address_it_was_given_only() -> None:
    script = """
import contextlib, os, socket
os.environ["MC_LOG_LEVEL"] = "ERROR"
from mooncake.engine import TransferEngine
from store.addresses import _wildcard_listeners, reachable_only_at
engine = TransferEngine()
with reachable_only_at("127.0.0.1"):
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
ports = [found.getsockname()[1] for _, found in _wildcard_listeners()]
assert engine.get_rpc_port() in ports and len(ports) >= 2, ports
for port in ports:
    socket.create_connection(("127.0.0.1", port), timeout=30).close()
    with socket.socket() as client, contextlib.suppress(TimeoutError):
        client.settimeout(0.3)
        client.connect(("127.0.0.2", port))
        raise SystemExit(f"{port} answers at another address")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
