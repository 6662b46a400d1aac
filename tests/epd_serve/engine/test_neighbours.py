"""An encoder hears how long steps of those take that decode on its device, and nothing else of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from epd_serve import wire
from epd_serve.engine.neighbours import Neighbours
from epd_serve.peers import Peer, write_peers
from epd_serve.roles import Role
from epd_serve.sockets import SUBSCRIBES, Socket, bind, open_socket, readable
from epd_serve.wire import StageReport
from epd_serve.wiring import StageWiring
from tests.waiting import wait_for


class Voice:
    """A stage that reports its load, as `LoadPublisher` does."""

    def __init__(self, folder: Path, instance: str, role: Role, device: int) -> None:
        address = f"ipc://{folder}/{instance}.load"
        self.peer = Peer(instance, role, devices=(device,), load=address)
        self.socket: Socket = open_socket(zmq.XPUB)
        bind(self.socket, address)

    def says(self, seconds: float) -> None:
        self.socket.send(wire.encode(StageReport(self.peer.instance, "life", 1, decode_step_s=seconds)))

    def heard_by_somebody(self) -> bytes:
        wait_for(lambda: readable(self.socket))
        return self.socket.recv()


@pytest.fixture
def voices(tmp_path: Path) -> Iterator[dict[str, Voice]]:
    made = {
        "PD0": Voice(tmp_path, "PD0", Role.PD, 0),
        "PD1": Voice(tmp_path, "PD1", Role.PD, 1),
        "P0": Voice(tmp_path, "P0", Role.P, 0),
    }
    e0 = Peer("E0", Role.E, devices=(0,))
    write_peers(tmp_path / "peers.json", [e0, *(voice.peer for voice in made.values())])
    yield made
    for voice in made.values():
        voice.socket.close()


def test_the_neighbour_that_decodes_is_heard_and_nobody_else(
    tmp_path: Path, voices: dict[str, Voice], monkeypatch: pytest.MonkeyPatch
) -> None:
    neighbours = Neighbours(StageWiring("E0", Role.E, "life", peers=f"{tmp_path}/peers.json"))
    assert neighbours.decode_step_s() == 0.0, "nobody has reported"
    topic = voices["PD0"].heard_by_somebody()
    assert topic.startswith(SUBSCRIBES) and topic != SUBSCRIBES, "or it would be told the whole cache"
    for voice in voices.values():
        voice.says(0.25 if voice is voices["PD0"] else 9.0)
    assert wait_for(neighbours.decode_step_s) == 0.25
    assert neighbours.decode_step_s() is None, "no news"
    monkeypatch.setattr("epd_serve.engine.neighbours.SILENT_S", 0.0)
    assert neighbours.decode_step_s() == 0.0, "it has gone, or hangs"
    assert not any(readable(voices[name].socket) for name in ("PD1", "P0")), "of another device; does not decode"
    neighbours.close()


@pytest.mark.parametrize("report", [StageReport("PD1", "life", 1), StageReport("PD10", "life", 1)])
def test_a_topic_is_of_one_instance(report: StageReport) -> None:
    whole = wire.encode(report)
    assert whole.startswith(wire.report_topic("PD1")) is (report.instance == "PD1")
