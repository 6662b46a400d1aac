"""A P whose links are to open while its graphs are captured. P and D but for vLLM, on fake devices."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from epd_serve.engine.capture_gate import capture_gate
from epd_serve.engine.kv import link as link_module
from epd_serve.kv.transport_selection import MOONCAKE, SHM
from tests.epd_serve.engine.kv.two_stages import Stages
from tests.waiting import wait_for


@pytest.fixture(autouse=True)
def gate() -> Iterator[None]:
    yield
    capture_gate.open()


@pytest.mark.parametrize("transport", [SHM, MOONCAKE])
def test_links_of_p_open_when_its_graphs_are_captured(stages: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "_IDLE_S", 0.05)
    wait_for(lambda: stages.d_worker._receiving()._entered, "D, which has captured its own")
    capture_gate.close()
    with stages.p_device.capturing():
        stages.start_p()
        (link,) = stages.p_worker._sending()._open_links()
        wait_for(lambda: stages.ended or link._thread._beats > 2, "the link's thread, which does not seem to hang")
    assert not stages.p_device.broken
    capture_gate.open()
    stages.wait_up()
    stages.send("after", 0)
    wait_for(stages.step_d, "KV at D", 20)
    assert stages.same(range(3))
    assert not (stages.p_device.broken or stages.d_device.broken)


def test_a_p_that_ends_before_its_graphs_are_captured(stages: Stages) -> None:
    capture_gate.close()
    with stages.p_device.capturing():
        stages.start_p()
        (link,) = stages.p_worker._sending()._open_links()
        stages.p_worker.close()
        wait_for(lambda: not link._thread.is_alive(), "the link's thread to end")
    assert not stages.p_device.broken
