"""What a link learns of its cost from probes."""

from __future__ import annotations

from typing import Any

import pytest

from epd_serve.engine.kv.link_cost import PROBE_BYTES, MeasuredCost


class Line:
    """A transport on which everything takes a + b·bytes, and the first move 0.5 s more."""

    def __init__(self, a: float, b: float, largest: int) -> None:
        self.largest_probe = largest
        self.now, self.moved = 0.0, []
        self._a, self._b = a, b

    def probe(self, nbytes: int, send: Any, receive: Any) -> None:
        self.now += self._a + self._b * nbytes + (0.5 if not self.moved else 0.0)
        self.moved.append(nbytes)


def test_probes_find_the_line_and_do_not_count_what_is_set_up_once() -> None:
    line = Line(300e-6, 2e-9, 4 << 20)
    cost = MeasuredCost(clock=lambda: line.now)
    cost.probe(line, None, None)
    assert line.moved == [size for size in PROBE_BYTES for _ in range(2)]
    assert cost.now().setup_s == pytest.approx(300e-6, rel=0.01)
    assert cost.now().s_per_byte == pytest.approx(2e-9, rel=0.01)


def test_probes_are_no_larger_than_the_transport_takes() -> None:
    small, tiny = Line(1e-4, 1e-9, 300 << 10), Line(1e-4, 1e-9, 2048)
    for line in (small, tiny):
        MeasuredCost(clock=lambda line=line: line.now).probe(line, None, None)
    assert small.moved == [64 << 10] * 2 + [256 << 10] * 2
    assert tiny.moved == [2048] * 2


def test_packets_that_get_slower_are_followed() -> None:
    cost = MeasuredCost()
    for _ in range(400):
        cost.observe(1 << 20, 1e-3)
    assert cost.now().seconds(1 << 20) == pytest.approx(1e-3, rel=0.05)
    for _ in range(400):
        cost.observe(1 << 20, 4e-3)
    assert cost.now().seconds(1 << 20) == pytest.approx(4e-3, rel=0.05)
