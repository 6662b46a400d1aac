"""A link's thread that hangs for ever: both ends get their blocks back. P and D but for vLLM, on fake devices."""

from __future__ import annotations

import threading

import pytest

from epd_serve.kv.transport_selection import MOONCAKE, SHM
from npu_ops import fences
from tests.epd_serve.engine.kv.two_stages import HUNG_S, Stages
from tests.waiting import wait_for


def assert_both_are_free(stages: Stages, reason: str) -> None:
    """Of two requests on the link, one of which its client left meanwhile."""
    stages.leave("left")
    wait_for(lambda: stages.ended, "P to end", 20)
    assert reason in stages.ended[0]
    wait_for(stages.step_d, "D's blocks", 20)
    assert not stages.d_device.broken


def send_two(stages: Stages) -> None:
    stages.send("stays", 0)
    stages.send("left", 3)


def test_a_fence_that_is_never_reached(stages: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    stages.start_p()
    stages.wait_up()
    gate = threading.Event()
    monkeypatch.setattr(fences, "DEADLINE_S", HUNG_S)
    stages.p_device.run(gate.wait)
    send_two(stages)
    assert_both_are_free(stages, "DeviceHungError")
    gate.set()


@pytest.mark.parametrize(
    ("transport", "call"),
    [(SHM, "wait"), (SHM, "gather"), (MOONCAKE, "wait"), (MOONCAKE, "write"), (MOONCAKE, "check a write")],
)
def test_a_call_that_does_not_return(stages: Stages, call: str) -> None:
    """Of the device, or of Mooncake."""
    stages.start_p()
    stages.wait_up()
    stages.p_device.hang(call)
    send_two(stages)
    assert_both_are_free(stages, "has hung for")


def test_a_device_that_never_lets_the_thread_in(stages: Stages) -> None:
    stages.p_device.hang("enter_thread")
    stages.start_p()
    send_two(stages)
    assert_both_are_free(stages, "has hung for")


def test_a_device_that_refuses_the_thread(stages: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages.p_device, "enter_thread", lambda: stages.p_device.allocate(1))
    stages.start_p()
    wait_for(lambda: stages.ended, "P to end", 20)
    assert "which has not set the device" in stages.ended[0]


def test_a_link_that_waits_for_its_peer_does_not_hang(stages: Stages) -> None:
    stages.d_worker.close()
    stages.start_p()
    wait_for(lambda: stages.p_worker._report().links[0].reason, "an attempt that fails later than it would hang", 20)
    assert not stages.ended
