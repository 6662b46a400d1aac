"""What `epd-bench plan` makes of predictions and measurements: its figures, from rows that are known by hand."""

from __future__ import annotations

from typing import Any

import pytest

from bench.planned import BELOW, VLLM, compared


def row(layout: str, predicted: float, measured: float, *, spread: float = 0.01, **more: Any) -> dict[str, Any]:
    """One workload, one rate of 1, each objective alike: shares within it."""
    return {
        "workload": "w", "layout": layout, "rate_rps": 1.0, "busy": 0.5, "attained": [predicted] * 3,
        "measured_attained": [measured] * 3,
        "measured_attained_90": [[measured - spread, measured + spread]] * 3,
        **more,
    }  # fmt: skip


def test_the_first_choice_is_held_against_the_best_measured_one() -> None:
    figures = compared([row("TP1x2", 0.9, 0.8), row("EP-D", 0.8, 1.0), row(VLLM, 0.0, 0.5)])

    assert figures["first_choice_over_best_worst"] == 0.8
    assert figures["best_layout_over_vllm"] == 2.0
    assert figures["best_layout_over_monolith"] == 1.25
    assert figures["goodput_rank_correlation"] == -1.0


def test_pairs_whose_intervals_meet_have_no_order() -> None:
    figures = compared([row("TP1x2", 0.9, 0.8, spread=0.2), row("EP-D", 0.8, 0.9, spread=0.2)])

    assert "goodput_rank_correlation" not in figures


@pytest.mark.parametrize(("busy", "error"), [(BELOW, 0.2), (BELOW + 0.01, None)])
def test_errors_count_below_capacity_alone(busy: float, error: float | None) -> None:
    times = {"predicted_ttft_p50_ms": 120.0, "measured_ttft_p50_ms": 100.0}
    figures = compared([row("TP1x2", 0.9, 0.8, **times) | {"busy": busy}])

    assert figures.get("ttft_error_median") == error


def test_what_was_not_measured_says_nothing() -> None:
    assert compared([{"workload": "w", "layout": "TP1x2", "rate_rps": 1.0, "busy": 0.5, "attained": [1.0] * 3}]) == {}
