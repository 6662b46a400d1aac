"""Reports of a sending worker's links: at once when something changes, but not all the time, and while nothing does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from epd_serve import wire
from epd_serve.engine.kv.reporter import Reporter
from epd_serve.roles import Role
from epd_serve.sockets import Socket, open_socket, readable
from epd_serve.wiring import StageWiring
from tests.waiting import PATIENCE_S

NEVER_S = 3600.0


def report(layer_s: float = 0.0) -> wire.KvReport:
    return wire.KvReport("P0", "i1", 0, "adaptive", layer_s, [wire.KvLink("D0", 0, "up", transport="shm")])


def wiring(publish: str, **more: object) -> StageWiring:
    return StageWiring("P0", Role.P, "i1", kv_publish=publish, **more)  # type: ignore[arg-type]


@contextmanager
def listening(address: str) -> Iterator[Socket]:
    socket = open_socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(address)
    try:
        yield socket
    finally:
        socket.close()


def heard(socket: Socket) -> wire.KvReport:
    assert readable(socket, PATIENCE_S), "no report came"
    message = wire.announcements.decode(socket.recv())
    assert isinstance(message, wire.KvReport)
    return message


@contextmanager
def reporting(
    publish: str, snapshot: Callable[[], wire.KvReport] = report, *, change_s: float = 0.0, idle_s: float = 0.05
) -> Iterator[Reporter]:
    reporter = Reporter(wiring(publish), 2, snapshot, change_s=change_s, idle_s=idle_s)
    reporter.start()
    try:
        yield reporter
    finally:
        reporter.close()


def test_a_worker_that_idles_still_reports(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/P0.kvnews"
    with reporting(address + "{rank}"), listening(address + "2") as news:
        assert [heard(news) for _ in range(3)] == [report()] * 3


def test_a_change_is_reported_without_waiting(tmp_path: Path) -> None:
    address, numbers = f"ipc://{tmp_path}/P0.kvnews2", iter(range(1000))
    taken = threading.Event()

    def snapshot() -> wire.KvReport:
        taken.set()
        return report(float(next(numbers)))

    with reporting(address, snapshot, idle_s=NEVER_S) as reporter, listening(address) as news:
        assert taken.wait(PATIENCE_S)
        deadline = time.monotonic() + PATIENCE_S
        while not readable(news, 0.05):  # nobody may have been subscribed yet
            assert time.monotonic() < deadline, "no report came"
            reporter.changed()
        while not heard(news).layer_s:  # the first one, if somebody was subscribed
            assert time.monotonic() < deadline, "no report of the change came"
            reporter.changed()


def test_many_changes_make_few_reports(tmp_path: Path) -> None:
    count, first = [0], threading.Event()

    def snapshot() -> wire.KvReport:
        count[0] += 1
        first.set()
        return report()

    with reporting(f"ipc://{tmp_path}/news", snapshot, change_s=NEVER_S, idle_s=2 * NEVER_S) as reporter:
        assert first.wait(PATIENCE_S)
        for _ in range(1000):
            reporter.changed()
    assert count == [1]


def test_a_change_during_a_report_is_in_the_next_one(tmp_path: Path) -> None:
    made: list[int] = []
    second = threading.Event()

    def snapshot() -> wire.KvReport:
        made.append(1)
        if len(made) == 1:
            reporter.changed()
        else:
            second.set()
        return report()

    reporter = Reporter(wiring(f"ipc://{tmp_path}/news"), 0, snapshot, change_s=0.0, idle_s=NEVER_S)
    reporter.start()
    assert second.wait(PATIENCE_S)
    reporter.close()


def test_a_report_that_cannot_be_made_does_not_end_the_reports(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address, failing = f"ipc://{tmp_path}/news", [True]

    def snapshot() -> wire.KvReport:
        if failing.pop() if failing else False:
            raise RuntimeError("no links yet")
        return report()

    with reporting(address, snapshot), listening(address) as news:
        assert heard(news) == report()
    assert "no links yet" in caplog.text


def test_a_worker_without_an_address_is_silent() -> None:
    def snapshot() -> wire.KvReport:
        raise AssertionError("asked for a report that nobody hears")

    reporter = Reporter(wiring(""), 0, snapshot)
    reporter.start()
    reporter.changed()
    reporter.close()


def test_closing_is_prompt_and_may_happen_twice_or_before_the_start(tmp_path: Path) -> None:
    with reporting(f"ipc://{tmp_path}/a", change_s=NEVER_S, idle_s=2 * NEVER_S) as reporter:
        begun = time.monotonic()
        reporter.close()
        assert time.monotonic() - begun < PATIENCE_S / 2
    Reporter(wiring(f"ipc://{tmp_path}/b"), 0, report).close()


def test_what_somebody_waits_for_is_told_long_before_other_news(tmp_path: Path) -> None:
    times: list[float] = []
    first, second = threading.Event(), threading.Event()

    def snapshot() -> wire.KvReport:
        times.append(time.monotonic())
        (second if first.is_set() else first).set()
        return report()

    with reporting(f"ipc://{tmp_path}/news", snapshot, change_s=NEVER_S, idle_s=2 * NEVER_S) as reporter:
        assert first.wait(PATIENCE_S)
        reporter.changed_urgently()
        assert second.wait(PATIENCE_S)
    assert times[1] - times[0] >= 0.04
