"""D against a peer that misbehaves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from epd_serve import wire
from epd_serve.kv.plan import Run
from tests.epd_serve.engine.kv.fakes import DecodeEnd, Ends, PrefillEnd, chunk, key_of, shape
from tests.epd_serve.engine.kv.fakes import packet as carrier
from tests.waiting import PATIENCE_S, wait_for


@pytest.fixture
def stranger() -> Iterator[zmq.Socket[bytes]]:
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    yield socket
    socket.close()


def test_done_from_a_connection_without_handshake_is_a_failure(start: Ends, stranger: zmq.Socket[bytes]) -> None:
    d = start(DecodeEnd)
    d.expect(key_of("a"), [5])
    stranger.connect(d.endpoint)
    stranger.send(wire.encode(wire.Done(key_of("a"), True)))
    d.wait_ended(1)
    assert d.failed


@pytest.mark.parametrize(
    "packet",
    [
        wire.Packet(1, 0, (0, 2), [(key_of("a"), [(5, 1)])]),
        wire.Packet(1, 0, (0, 99), [(key_of("a"), [(5, 1)])]),
        wire.Packet(1, 0, (0, 2), [(key_of("a"), [(31, 2)])]),
        wire.Packet(1, 1 << 40, (0, 2), [(key_of("a"), [(5, 1)])]),
        wire.Packet(1, 0, (0, 2), [(key_of("a"), [(-1, 1)])]),
    ],
)
def test_a_packet_that_cannot_be_written_fails_its_transfer_and_not_the_worker(
    start: Ends, stranger: zmq.Socket[bytes], packet: wire.Packet
) -> None:
    d = start(DecodeEnd)
    p = start(PrefillEnd)
    d.expect(key_of("a"), [5])
    d.expect(key_of("b"), [7])
    p.wait_up(d)
    p.step([chunk(d, "b", [1], [7], last=False)])
    wait_for(lambda: bool(d.caches["layer.4"][7].any()))
    if packet.offset or packet.layers != (0, 2) or packet.parts[0][1] != [(5, 1)]:
        link = p.links[d.endpoint]  # after a handshake
        connection = link._connection

        def forge() -> None:
            """In the link's thread, whose socket it is."""
            connection.side._seq += 1
            connection._socket.send(wire.encode(msgspec.structs.replace(packet, seq=connection.side._seq)))

        link.put(carrier(d, "c", (0, 1), [Run(0, 0, 1)], forge), 0.0)
    else:
        stranger.connect(d.endpoint)
        stranger.send(wire.encode(packet))
    d.wait_ended(1)
    assert [item.request for item in d.failed] == ["at-d-a"]
    p.step([chunk(d, "b", [2], [8], last=True)])
    d.wait_ended(2)
    assert [item.request for item in d.received] == ["at-d-b"]


@pytest.mark.parametrize(("path", "size"), [("nowhere", 4096), ("memory", 1 << 20), ("memory", 0)])
def test_staging_memory_that_cannot_be_mapped_is_refused_not_met_with_silence(
    start: Ends, stranger: zmq.Socket[bytes], tmp_path: Path, path: str, size: int
) -> None:
    d = start(DecodeEnd)
    (tmp_path / "memory").write_bytes(bytes(100) if size else b"")
    stranger.connect(d.endpoint)
    stranger.send(wire.encode(wire.Hello(wire.VERSION, "P0:1", "shm", shape(d.layers), str(tmp_path / path), size)))
    assert stranger.poll(int(1e3 * PATIENCE_S))
    answer = wire.to_prefill_worker.decode(stranger.recv())
    assert isinstance(answer, wire.HelloRefused)
    assert "staging memory" in answer.reason


def test_garbage_does_not_end_the_listener(start: Ends, stranger: zmq.Socket[bytes]) -> None:
    d = start(DecodeEnd)
    p = start(PrefillEnd)
    stranger.connect(d.endpoint)
    stranger.send(b"\xff\xff")
    stranger.send_multipart([b"one", b"two", b"three"])
    d.expect(key_of("a"), [5])
    p.step([chunk(d, "a", [1], [5], last=True)])
    d.wait_ended(1)
    assert d.received
