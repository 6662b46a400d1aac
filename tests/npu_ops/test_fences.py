"""A fence is asked for, again and again: soon at first, then without taking a core, and not for ever."""

from __future__ import annotations

import threading

import pytest

from npu_ops import fences
from npu_ops.fences import DeviceHungError, wait_until
from tests.fake_npu.device import FakeDevice


class Asked:
    """A fence that is reached when it was asked for so often, on a clock that only pauses move."""

    def __init__(self, reached_after: int | None) -> None:
        self.asked, self.now = 0, 0.0
        self.pauses: list[float] = []
        self._reached_after = reached_after

    def query(self) -> bool:
        self.asked += 1
        return self._reached_after is not None and self.asked > self._reached_after

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def wait(self) -> None:
        wait_until(self.query, clock=lambda: self.now, sleep=self.sleep)


def test_what_is_about_to_be_reached_is_not_slept_for() -> None:
    fence = Asked(5)
    fence.wait()
    assert fence.asked == 6 and not fence.pauses


def test_a_long_wait_sleeps_between_looks_and_is_late_by_no_more_than_100_us() -> None:
    fence = Asked(500)
    fence.wait()
    assert fence.asked == 501
    assert len(fence.pauses) > 450 and max(fence.pauses) <= 100e-6


def test_a_device_that_hangs_is_named_at_the_deadline() -> None:
    fence = Asked(None)
    with pytest.raises(DeviceHungError, match="60 s"):
        fence.wait()
    assert fence.now == pytest.approx(fences.DEADLINE_S, abs=1e-3)


def test_the_fake_hangs_as_a_device_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fences, "DEADLINE_S", 0.05)
    device, gate = FakeDevice(), threading.Event()
    device.enter_thread()
    device.run(gate.wait)
    wait = device.fence()
    with pytest.raises(DeviceHungError):
        wait()
    gate.set()
    device.fence()()
