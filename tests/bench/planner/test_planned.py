"""What `epd-bench plan` makes of predictions and measurements: its figures, from rows that are known by hand."""

from __future__ import annotations

from typing import Any

import pytest

from bench.planner.planned import BELOW, VLLM, compared, speed_figures


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
    assert figures["first_choice_held"] == 0.0 and figures["first_choice_over_monolith_worst"] == 1.0
    assert figures["constant_over_best_worst"] == 1.0, "EP-D whatever the case"


def test_a_set_in_which_no_one_layout_is_always_best_fails_constant_answers() -> None:
    """Two workloads, each with a layout of its own, and a planner that knows which."""
    one = [row("TP1x2", 0.9, 0.9), row("EP-D", 0.6, 0.6)]
    other = [row("TP1x2", 0.5, 0.5) | {"workload": "v"}, row("EP-D", 1.0, 1.0) | {"workload": "v"}]
    figures = compared([*one, *other])

    assert figures["first_choice_over_best_worst"] == figures["first_choice_held"] == 1.0
    assert figures["constant_over_best_worst"] == pytest.approx(0.6667)
    assert figures["first_choice_over_monolith_worst"] == 1.0 and figures["best_layout_over_monolith"] == 2.0


def test_a_first_choice_holds_where_its_interval_meets_the_best_ones() -> None:
    figures = compared([row("TP1x2", 0.9, 0.8, spread=0.2), row("EP-D", 0.8, 0.9, spread=0.2)])

    assert figures["first_choice_held"] == 1.0 and figures["first_choice_over_best_worst"] < 0.95
    assert figures["best_layout_over_monolith"] == 1.0, "what intervals do not tell apart is no gain"


def test_how_far_two_seeds_are_apart_is_told() -> None:
    figures = compared([row("TP1x2", 0.9, 0.8, repeats=[{"seed_ttft_p50_ms": 110.0}, {"seed_ttft_p50_ms": 100.0}])])

    assert figures["ttft_repeat_median"] == 0.1 and "tpot_repeat_median" not in figures


def test_pairs_whose_intervals_meet_have_no_order() -> None:
    figures = compared([row("TP1x2", 0.9, 0.8, spread=0.2), row("EP-D", 0.8, 0.9, spread=0.2)])

    assert "goodput_rank_correlation" not in figures


@pytest.mark.parametrize(("busy", "error"), [(BELOW, 0.2), (BELOW + 0.01, None)])
def test_errors_count_below_capacity_alone(busy: float, error: float | None) -> None:
    times = {"predicted_ttft_p50_ms": 120.0, "measured_ttft_p50_ms": 100.0}
    figures = compared([row("TP1x2", 0.9, 0.8, **times) | {"busy": busy}])

    assert figures.get("ttft_error_median") == error


def test_plain_vllm_alone_is_no_case() -> None:
    assert "cases" not in compared([row(VLLM, 0.0, 0.5)])


def test_what_was_not_measured_says_nothing() -> None:
    assert compared([{"workload": "w", "layout": "TP1x2", "rate_rps": 1.0, "busy": 0.5, "attained": [1.0] * 3}]) == {}


def test_what_was_timed_is_a_figure_by_its_devices() -> None:
    rows = [
        {"timed": "plan", "devices": 8, "seconds": 6.4},
        {"timed": "day", "devices": 128, "seconds": 540.0, "requests": 1_000_000},
    ]

    assert speed_figures(rows) == {"plan_s_8": 6.4, "day_128_s": 540.0, "day_128_requests": 1e6}
