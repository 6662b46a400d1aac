"""Reports that go out: at once on change, and again and again without one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from epd_serve import wire
from epd_serve.cache_ledger import CacheLedger, unpacked
from epd_serve.engine.status.publisher import LoadPublisher
from epd_serve.roles import Role
from epd_serve.sockets import Socket, open_socket, readable
from epd_serve.wire import StageReport
from epd_serve.wiring import StageWiring
from tests.waiting import PATIENCE_S, wait_for


@pytest.fixture
def ear(tmp_path: Path) -> Iterator[Socket]:
    with open_socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        yield socket


def wiring(tmp_path: Path) -> StageWiring:
    return StageWiring("P0", Role.P, "life", load_publish=f"ipc://{tmp_path}/P0.load")


def announced(ear: Socket) -> wire.Announcement:
    assert readable(ear, PATIENCE_S), "no report"
    return wire.announcements.decode(ear.recv())


def heard(ear: Socket) -> StageReport:
    message = announced(ear)
    assert isinstance(message, StageReport)
    return message


def test_an_idle_engine_is_heard_again_and_again(tmp_path: Path, ear: Socket) -> None:
    publisher = LoadPublisher(wiring(tmp_path), change_s=0.001, idle_s=0.01)
    ear.connect(f"ipc://{tmp_path}/P0.load")
    first, second = heard(ear), heard(ear)
    assert (first.instance, first.incarnation, first.waiting) == ("P0", "life", 0)
    assert second.seq == first.seq + 1
    publisher.close()
    publisher.close()


def test_a_change_goes_out_without_waiting_for_the_heartbeat(tmp_path: Path, ear: Socket) -> None:
    publisher = LoadPublisher(wiring(tmp_path), change_s=0.001, idle_s=3600.0)
    ear.connect(f"ipc://{tmp_path}/P0.load")
    number = 0
    while not readable(ear, 0.05):  # until the subscription has arrived
        number += 1
        publisher.offer(StageReport("P0", "life", 0, waiting=number))
    publisher.offer(StageReport("P0", "life", 0, waiting=-1))
    while heard(ear).waiting != -1:
        pass
    publisher.close()


def test_a_report_that_cannot_be_written_ends_none_of_those_after_it(
    tmp_path: Path, ear: Socket, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = LoadPublisher(wiring(tmp_path), change_s=0.001, idle_s=0.01)
    ear.connect(f"ipc://{tmp_path}/P0.load")
    publisher.offer(StageReport("P0", "life", 0, waiting=2**70))  # more than msgpack has
    wait_for(lambda: "a load report is lost" in caplog.text)
    publisher.offer(StageReport("P0", "life", 0, waiting=7))
    while heard(ear).waiting != 7:
        pass
    publisher.close()


def test_an_engine_whose_reports_nobody_could_hear_does_not_start(tmp_path: Path) -> None:
    nowhere = StageWiring("P0", Role.P, "life", load_publish=f"ipc://{tmp_path}/no/such/folder")
    with pytest.raises(zmq.ZMQError):
        LoadPublisher(nowhere)


def test_who_subscribes_is_told_all_that_is_cached_and_who_missed_something_again(tmp_path: Path, ear: Socket) -> None:
    cache = CacheLedger("P0", "life", 16)
    cache.is_now(7, True)
    cache.take()
    publisher = LoadPublisher(wiring(tmp_path), cache, change_s=0.001, idle_s=0.01)
    ear.connect(f"ipc://{tmp_path}/P0.load")

    def whole() -> list[int]:
        while not isinstance(message := announced(ear), wire.CacheReport) or message.part != "first":
            pass
        return list(unpacked(message.stored))

    assert whole() == [7]
    cache.is_now(8, True)
    ear.setsockopt(zmq.SUBSCRIBE, wire.WHOLE_TOPIC + b"P1")
    ear.setsockopt(zmq.SUBSCRIBE, wire.WHOLE_TOPIC + b"P0")
    ear.setsockopt(zmq.UNSUBSCRIBE, wire.WHOLE_TOPIC + b"P0")
    assert whole() == [7, 8]
    publisher.close()
