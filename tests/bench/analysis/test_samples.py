"""The pure parts of a comparison: directions, columns that give a figure, what may be compared."""

from __future__ import annotations

import random
import statistics
from typing import Any

import pytest

from bench.analysis.compare import Compared, figures
from bench.analysis.conditions import refusals
from bench.analysis.metrics import better
from bench.analysis.results import Result, read_results
from bench.analysis.samples import row_samples
from bench.record import ROOT


@pytest.mark.parametrize(
    ("figure", "direction"),
    [
        ("1 rps/ttft_ms/p99", "lower"),
        ("1 rps/slo_2000:50/attainment", "higher"),
        ("1 rps/slo_2000:50/effective_tokens_per_s_per_device", "higher"),
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


def test_the_column_that_gives_a_figure_in_both_is_its_sample():
    def rows(seed: int) -> list[dict[str, Any]]:
        chance = random.Random(seed)
        return [
            {"target": target, "mode": "unique", "ttft_ms": chance.random(), "parts_ms": {"put": chance.random()}}
            for target in ("TP1", "TP1 past the proxy")
            for _ in range(12)
        ]

    a, b = rows(1), rows(2)
    of = [[row["ttft_ms"] for row in side if row["target"] == "TP1"] for side in (a, b)]
    medians = statistics.median(of[0]), statistics.median(of[1])

    found = row_samples("unique/TP1/median_ms", a, b, medians)
    assert (found.base.percent, found.base.values.tolist(), found.other.values.tolist()) == (50, *of)
    assert row_samples("unique/TP1 past the proxy/median_ms", a, b, medians).base is None
    assert row_samples("unique/TP1/median_ms", a, b, (medians[0], 7.0)).why == "no column of the rows gives it"
    put = [statistics.fmean(row["parts_ms"]["put"] for row in side[:12]) for side in (a, b)]
    assert row_samples("unique/TP1/put", a, b, (put[0], put[1])).base.percent is None


def test_our_own_results_can_be_compared_with_themselves():
    for one in read_results(ROOT / "bench" / "results"):
        assert refusals(one, one) == []


def test_another_measurement_is_refused():
    results = {one.name: one for one in read_results(ROOT / "bench" / "results")}

    assert "measurement: A is 'ttft', B is 'startup'" in refusals(results["ttft"], results["startup"])


def test_another_flag_is_refused_and_more_requests_are_not(tmp_path):
    def asked(**flags: object) -> Result:
        return Result("", tmp_path, {}, {"kind": "real", "command": "epd-bench ttft", "asked": flags}, ())

    assert refusals(asked(preset="demo", requests=8, json="a"), asked(preset="demo", requests=30, json="b")) == []
    assert refusals(asked(preset="demo"), asked(preset="bench")) == ["--preset: A has demo, B has bench"]


def test_figures_without_a_ratio_are_left_out_of_the_record():
    found = [Compared("", "r", "x", 0.0, 1.0, None, ""), Compared("e", "", "y", 1.0, 2.0, 2.0, "higher", 1.5, 2.5)]

    assert figures(found) == {"e/y/ratio": 2.0, "e/y/low": 1.5, "e/y/high": 2.5}
    assert found[1].verdict == "better"
