"""Layer times come from the device's fences, when the device has got there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from epd_serve.engine.kv.layer_clock import LayerClock
from epd_serve.trace import Trace
from tests.epd_serve.engine.kv.fakes import NO_TRACE


class Device:
    """Fences of a device whose layers take `layer_s`, reached once `ready`."""

    def __init__(self) -> None:
        self.now, self.ready, self.made = 0.0, True, 0

    def timed_fence(self) -> Fence:
        self.made += 1
        return Fence(self, self.now)


class Fence:
    def __init__(self, device: Device, at: float) -> None:
        self._device, self._at = device, at

    def seconds_since(self, earlier: Fence) -> float | None:
        return self._at - earlier._at if self._device.ready else None


def step(
    clock: LayerClock, device: Device, tokens: int, layer_s: float, layers: int = 5, *, tail_s: float = 0.0
) -> None:
    clock.begin(tokens)
    for _ in range(layers):
        device.now += layer_s
        clock.layer(None)
    device.now += tail_s
    clock.end()


def test_the_time_of_a_layer_follows_the_tokens_of_the_step() -> None:
    device = Device()
    clock = LayerClock(device, 5, NO_TRACE)
    for tokens in (100, 1000, 100, 2000, 500, 1000):
        step(clock, device, tokens, 1e-3 + tokens * 1e-6)
    assert clock.layer_s(1500) == pytest.approx(2.5e-3, rel=0.02)
    assert clock.last_s == pytest.approx(2e-3)
    assert device.made == 3 * 6  # three fences for each step


def test_what_is_left_of_a_step_after_its_last_layer_follows_its_tokens() -> None:
    device = Device()
    clock = LayerClock(device, 5, NO_TRACE)
    assert clock.tail_s(1000) == 0.0  # nothing is counted on that was not seen
    for tokens in (100, 1000, 100, 2000, 500, 1000):
        step(clock, device, tokens, 1e-3, tail_s=tokens * 2e-6)
        clock.layer_s(tokens)
    assert clock.tail_s(1500) == pytest.approx(3e-3, rel=0.02)


def test_a_step_counts_once_the_device_has_done_it() -> None:
    device = Device()
    clock = LayerClock(device, 5, NO_TRACE)
    device.ready = False
    step(clock, device, 100, 0.02)
    clock.layer_s(100)
    assert clock.last_s == 0.0
    device.ready = True
    clock.layer_s(100)
    assert clock.last_s == pytest.approx(0.02)


def test_a_step_whose_layers_were_not_all_announced_is_not_measured() -> None:
    device = Device()
    clock = LayerClock(device, 5, NO_TRACE)
    step(clock, device, 100, 0.02, layers=3)
    clock.layer_s(100)
    assert clock.last_s == 0.0


def test_each_step_is_stamped(tmp_path: Path) -> None:
    device = Device()
    clock = LayerClock(device, 3, Trace(str(tmp_path / "trace"), "P0"))
    step(clock, device, 7, 0.01, layers=3)
    (stamp,) = map(json.loads, (tmp_path / "trace").read_text().splitlines())
    assert (stamp["subject"], stamp["event"], stamp["tokens"]) == ("step", "prefill_step", 7)
    assert stamp["t0"] <= stamp["layers"][0] <= stamp["layers"][2] <= stamp["t"]
    assert len(stamp["layers"]) == 3
