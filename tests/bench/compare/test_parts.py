"""The pure parts of a comparison: drawing, directions, columns that give a figure."""

from __future__ import annotations

import random
import statistics

import numpy as np
import pytest

from bench.compare.bootstrap import draw, interval, percentiles, share, whole
from bench.compare.command import figures
from bench.compare.compared import Compared
from bench.compare.conditions import refusals
from bench.compare.direction import better
from bench.compare.results import Result, read_results
from bench.compare.rounds import least, samples_of
from bench.record import ROOT
from bench.statistic import percentile


def test_resamples_are_as_large_as_the_sample_and_the_same_for_a_seed():
    weights = draw(50, 20, seed=3)

    assert weights.shape == (20, 50) and (weights.sum(axis=1) == 50).all()
    assert (weights == draw(50, 20, seed=3)).all() and (weights != draw(50, 20, seed=4)).any()


def test_neighbours_are_drawn_together():
    weights = draw(1000, 200, seed=0)

    next_to = np.mean([np.corrcoef(one[:-1], one[1:])[0, 1] for one in weights])
    far = np.mean([np.corrcoef(one[:-100], one[100:])[0, 1] for one in weights])
    assert next_to > 0.8 and abs(far) < 0.1


def test_a_percentile_of_the_sample_itself_is_the_nearest_rank():
    chance = random.Random(0)
    values = [chance.random() for _ in range(37)]

    for percent in (1, 50, 90, 95, 99, 100):
        (found,) = percentiles(whole(37), np.asarray(values), np.arange(37), (percent,))
        assert found[0] == percentile(values, percent)


def test_a_percentile_under_weights_is_that_of_the_repeated_values():
    values, weights = [3.0, 1.0, 2.0], np.asarray([[2, 0, 1], [0, 3, 0], [0, 0, 0]])

    (found,) = percentiles(weights, np.asarray(values), np.arange(3), (50,))
    assert found[:2].tolist() == [3.0, 1.0] and np.isnan(found[2])


def test_the_interval_of_a_mean_is_as_wide_as_theory_says():
    chance = np.random.default_rng(0)
    a, b = chance.normal(10, 1, 1000), chance.normal(10, 1, 1000)
    ones = np.ones(1000)

    found = interval(share(draw(1000, 600, 1), b, ones), share(draw(1000, 600, 2), a, ones))

    assert found is not None
    expected = 2 * 1.96 * np.sqrt(2 / 1000) / 10
    assert found[1] - found[0] == pytest.approx(expected, rel=0.25)


def test_ratios_that_are_mostly_nothing_have_no_interval():
    assert interval(np.ones(10), np.zeros(10)) is None


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
    def rows(seed: int) -> list[dict[str, object]]:
        chance = random.Random(seed)
        return [
            {"target": target, "mode": "unique", "ttft_ms": chance.random(), "parts_ms": {"put": chance.random()}}
            for target in ("TP1", "TP1 past the proxy")
            for _ in range(12)
        ]

    a, b = rows(1), rows(2)
    of = [[row["ttft_ms"] for row in side if row["target"] == "TP1"] for side in (a, b)]
    medians = statistics.median(of[0]), statistics.median(of[1])

    assert samples_of("unique/TP1/median_ms", a, b, medians) == ("median", *of)
    assert samples_of("unique/TP1 past the proxy/median_ms", a, b, medians) is None
    assert samples_of("unique/TP1/median_ms", a, b, (medians[0], 7.0)) is None
    put = [statistics.fmean(row["parts_ms"]["put"] for row in side[:12]) for side in (a, b)]  # type: ignore[index]
    assert samples_of("unique/TP1/put", a, b, (put[0], put[1]))[0] == "mean"


def test_a_percentile_far_out_needs_more_rows():
    assert (least("median"), least("p90"), least("p25")) == (10, 50, 20)


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
    found = [Compared("", "r", "x", 0.0, 1.0, None, ""), Compared("e", "", "y", 1.0, 2.0, 2.0, "higher", (1.5, 2.5))]

    assert figures(found) == {"e/y/ratio": 2.0, "e/y/low": 1.5, "e/y/high": 2.5}
    assert found[1].verdict == "better"
