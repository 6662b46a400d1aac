"""The pure parts of a comparison: directions, what may be compared, what a ratio says."""

from __future__ import annotations

import pytest

from bench.analysis.compare import Compared, figures, refusals, warnings
from bench.analysis.ratios import Ratio, Verdict, plain_ratio
from bench.analysis.results import Result, read_results
from bench.analysis.sweep_results import better
from bench.record import ROOT


@pytest.mark.parametrize(
    ("figure", "direction"),
    [
        ("1 rps/ttft_ms/p99", "lower"),
        ("1 rps/slo_2000:50:p90/attainment", "higher"),
        ("1 rps/slo_2000:50:p90/effective_tokens_per_s_per_device", "higher"),
        ("goodput_rps", "higher"),
        ("1 rps/answered_rps", "higher"),
        ("1 rps/offered_rps", ""),
        ("1 rps/requests", ""),
        ("1 rps/error", "lower"),
        ("1 rps/generator/late_p99_ms", ""),
        ("overlap_280x280_arena", "higher"),
        ("exposed_ms_280x280_arena", "lower"),
        ("layouts/E-P-D/ready_s", "lower"),
        ("tput_E_PD_over_TP1", "higher"),
        ("tpot_E_PD_over_TP1", "lower"),
        ("unique/TP1/median_ms", "lower"),
        ("generator_rps_per_core", "higher"),
        ("what nobody knows", ""),
    ],
)
def test_better_is_told_by_the_name(figure, direction):
    assert better(figure) == direction


def test_our_own_results_can_be_compared_with_themselves():
    for one in read_results(ROOT / "bench" / "results"):
        assert refusals(one, one) == []


def test_another_measurement_is_refused():
    results = {one.name: one for one in read_results(ROOT / "bench" / "results")}

    assert "measurement: A has ttft, B has latency" in refusals(results["ttft"], results["latency"])


def test_another_flag_is_said(tmp_path):
    def asked(**flags: object) -> Result:
        return Result("", tmp_path, {}, {"kind": "real", "command": "epd-bench ttft", "asked": flags}, ())

    one, other = asked(preset="demo", requests=8, json="a"), asked(preset="demo", requests=30, json="b")
    assert refusals(one, other) == [] and warnings(one, other) == ["requests: A has 8, B has 30"]


def test_figures_without_a_ratio_are_left_out_of_the_record() -> None:
    found = [Compared("r", plain_ratio("x", 0.0, 1.0, "")), Compared("e", Ratio("y", 1.0, 2.0, 2.0, 1.5, 2.5))]

    assert figures(found) == {"e/y/ratio": 2.0, "e/y/low": 1.5, "e/y/high": 2.5}


@pytest.mark.parametrize(
    ("figure", "ratio", "low", "high", "verdict"),
    [
        ("ttft_ms/mean", 1.3, 1.2, 1.4, "worse"),
        ("ttft_ms/mean", 0.7, 0.6, 0.8, "better"),
        ("output_tokens_per_s", 1.3, 1.2, 1.4, "better"),
        ("ttft_ms/mean", 1.3, 0.9, 1.4, "no difference shown"),
        ("ttft_ms/mean", 1.01, 1.009, 1.011, "no difference shown"),
        ("ttft_ms/mean", 1.3, None, None, "no interval"),
        ("requests", 1.3, None, None, ""),
        ("requests", 1.3, 1.2, 1.4, ""),
    ],
)
def test_a_ratio_says_something_beyond_its_interval_and_beyond_what_anybody_would_choose_by(
    figure: str, ratio: float, low: float | None, high: float | None, verdict: Verdict
) -> None:
    assert Ratio(figure, 1.0, ratio, ratio, low, high).verdict == verdict
