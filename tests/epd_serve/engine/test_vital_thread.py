"""A thread that a stage cannot do without ends it when it fails or hangs, and not when the process was stopped."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from epd_serve.engine import vital_thread
from epd_serve.engine.vital_thread import VitalThread

FAILS = """
from epd_serve.engine.vital_thread import VitalThread
def work():
    raise ValueError("the device is gone")
thread = VitalThread("epd-test", work)
thread.start()
while True:  # the main thread hangs as well
    thread.join()
"""


def test_the_process_ends_with_the_reason() -> None:
    ended = subprocess.run([sys.executable, "-c", FAILS], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert "this stage ends: thread epd-test failed: ValueError: the device is gone" in ended.stderr


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(vital_thread, "time", made)
    return made


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    reasons: list[str] = []
    monkeypatch.setattr(vital_thread, "end_stage", reasons.append)
    return reasons


@pytest.fixture
def hanging(clock: Clock) -> Iterator[VitalThread]:
    released = threading.Event()
    thread = VitalThread("epd-test", released.wait)
    thread.start()
    yield thread
    released.set()
    thread.join()


def look(thread: VitalThread, clock: Clock, seconds: float, *, beats: bool = False) -> None:
    for _ in range(int(seconds)):
        clock.now += 1
        if beats:
            thread.beat()
        thread.look()


def test_one_that_hangs_is_shown_where_it_does(hanging: VitalThread, clock: Clock, ended: list[str]) -> None:
    look(hanging, clock, vital_thread.HUNG_S)
    assert not ended
    look(hanging, clock, 2)
    assert "epd-test has hung for" in ended[0] and "in wait" in ended[0]


def test_one_that_gets_on_does_not(hanging: VitalThread, clock: Clock, ended: list[str]) -> None:
    look(hanging, clock, 3 * vital_thread.HUNG_S, beats=True)
    assert not ended


def test_the_time_of_a_process_that_was_stopped_does_not_count(
    hanging: VitalThread, clock: Clock, ended: list[str]
) -> None:
    clock.now += 10 * vital_thread.HUNG_S
    hanging.look()
    assert not ended


def test_one_that_has_ended_as_it_should_does_not_hang(clock: Clock, ended: list[str]) -> None:
    thread = VitalThread("epd-test", lambda: None)
    thread.start()
    thread.join()
    look(thread, clock, 2 * vital_thread.HUNG_S)
    assert not ended
