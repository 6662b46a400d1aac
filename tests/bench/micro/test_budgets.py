"""From turns with and without budgets to figures."""

from __future__ import annotations

from typing import Any

import pytest

from bench.micro.budgets import OFF, ON, figures


def turn(part: str, budgets: str, number: int, **found: Any) -> dict[str, Any]:
    return {"part": part, "budgets": budgets, "round": number, **found}


def turns(part: str, budgets: str, gap_ms: float, attained: float, by_gaps: float) -> list[dict[str, Any]]:
    found = {"gap_p50_ms": 1.0, "gap_p99_ms": gap_ms, "text_ttft_ms": 2 * gap_ms, "image_ttft_ms": 9.0}
    return [turn(part, budgets, number, **found, attained_mean=attained, attained_gaps=by_gaps) for number in range(2)]


ROWS = [
    *turns("tp1", ON, 100.0, 0.9, 0.8),
    *turns("tp1", OFF, 200.0, 0.8, 0.9),
    *turns("ep", ON, 80.0, 1.0, 1.0),
    *turns("ep", OFF, 100.0, 1.0, 1.0),
    turn("throughput", ON, 0, tokens_per_s=99.0),
    turn("throughput", OFF, 0, tokens_per_s=100.0),
]


def test_ratios_are_on_over_off_and_points_on_minus_off_by_either_judge() -> None:
    found = figures(ROWS)
    assert found["tp1_gap_p99_ratio"] == 0.5
    assert found["ep_text_ttft_ratio"] == 0.8
    assert found["throughput_ratio"] == 0.99
    assert (found["attained_points_worst"], found["attained_points_best"]) == (pytest.approx(-10), pytest.approx(10))
    assert "colocated_gap_p99_ratio" not in found, "not measured"


def test_an_interrupted_run_has_no_ratio() -> None:
    assert figures(ROWS[:1]) == {}
