"""Stamps of what a device does are made when it has done it."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from epd_serve.trace import DeviceTrace, Trace
from npu_ops.fences import DeviceHungError
from npu_ops.torch_memory import HostMemory
from tests.fake_npu.device import FakeDevice
from tests.waiting import wait_for


def stamps(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_stamp_waits_for_what_was_queued_before_it_and_not_for_what_comes_after(tmp_path: Path) -> None:
    device, before, after = FakeDevice(), threading.Event(), threading.Event()
    trace = DeviceTrace(Trace(str(tmp_path / "E0"), "E0"), device)
    device.enter_thread()
    device.run(lambda: before.wait())
    trace.stamp("a picture", "encoded", tokens=7)
    device.run(lambda: after.wait())
    opened = time.monotonic()
    assert stamps(tmp_path / "E0") == []

    before.set()
    wait_for(lambda: stamps(tmp_path / "E0"))
    (stamp,) = stamps(tmp_path / "E0")
    assert (stamp["instance"], stamp["subject"], stamp["event"], stamp["tokens"]) == ("E0", "a picture", "encoded", 7)
    assert stamp["t"] > opened
    assert device.broken == []
    after.set()
    trace.close()


def test_what_was_told_before_the_end_is_stamped(tmp_path: Path) -> None:
    device, gate = FakeDevice(), threading.Event()
    trace = DeviceTrace(Trace(str(tmp_path / "P0"), "P0"), device)
    device.enter_thread()
    device.run(lambda: gate.wait())
    for transfer in "abc":
        trace.stamp(transfer, "prefill_end")
    gate.set()
    trace.close()
    assert [stamp["subject"] for stamp in stamps(tmp_path / "P0")] == ["a", "b", "c"]


def test_a_stamp_that_the_device_refuses_is_named_and_those_after_it_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> None:
        raise DeviceHungError("it is not reached")

    device = FakeDevice()
    trace = DeviceTrace(Trace(str(tmp_path / "P0"), "P0"), device)
    device.enter_thread()
    with monkeypatch.context() as broken:
        broken.setattr(device, "fence", lambda: refuse)
        trace.stamp("a", "prefill_end")
    trace.stamp("b", "prefill_end")
    trace.close()
    assert [stamp["subject"] for stamp in stamps(tmp_path / "P0")] == ["b"]
    assert "no stamp prefill_end of a" in caplog.text


def test_a_device_that_works_in_the_calling_thread_is_stamped_at_once(tmp_path: Path) -> None:
    threads = threading.active_count()
    trace = DeviceTrace(Trace(str(tmp_path / "P0"), "P0"), HostMemory())
    trace.stamp("a", "prefill_end")
    assert [stamp["subject"] for stamp in stamps(tmp_path / "P0")] == ["a"]
    assert threading.active_count() == threads
    trace.close()


def test_without_a_trace_nothing_is_asked_of_the_device() -> None:
    trace = DeviceTrace(Trace("", "P0"), FakeDevice())  # which refuses a thread that has not entered
    trace.stamp("a", "prefill_end")
    trace.close()
