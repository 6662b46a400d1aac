"""Cells, ranks, Table 5, goodput, the best and the ratios: numbers and fields."""

from __future__ import annotations

import csv
import io

import pytest

from bench.analysis import tables
from bench.analysis.sweep_results import THROUGHPUT_PER_DEVICE, TTFT, ranked, ranks, read_sweep
from bench.analysis.tables import Table, monolith, shown
from bench.clients.slo import PAPER
from epd_serve.errors import ConfigError
from epd_serve.slo import Slo
from tests.bench.analysis.sweeps import FUSED, SPLIT, asked, deployment, measured, phases_line, requests, sweep

MONO, FAST, WIDE = deployment("TP1x2", baseline=True), deployment("(E-P)-D"), deployment("E-P-D", 3)
TTFTS = {"TP1x2": 1.5, "(E-P)-D": 0.2, "E-P-D": 0.2}
GAPS = {"TP1x2": 0.06, "(E-P)-D": 0.01, "E-P-D": 0.01}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """E-P-D has no good answer at 4 req/s; TP1x2 is too slow for the first objective."""
    at = tmp_path_factory.mktemp("results")
    return sweep(at, [MONO, FAST, WIDE], TTFTS, gaps=GAPS, rates=(2.0, 4.0), bad=[("E-P-D", 4.0)], count=20)


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (None, ""),
        (True, "yes"),
        (12, "12"),
        (0.0, "0"),
        (1234567.8, "1234568"),
        (12.3456, "12.35"),
        (100.0, "100"),
        (0.000012345, "0.00001234"),
        (-0.5, "-0.5"),
    ],
)
def test_numbers_have_four_digits_and_no_exponent(cell, text):
    assert shown(cell) == text


def test_a_figure_that_is_no_number_is_never_printed():
    with pytest.raises(AssertionError):
        shown(float("nan"))


def test_a_table_is_a_file_with_the_digits_that_are_shown_and_its_kind():
    table = Table("s", "Title", [{"name": "x, y", "a (ms)": 12.3456}, {"name": "z", "a (ms)": None}])

    assert table.cells == [["x, y", "12.35"], ["z", ""]]
    assert list(csv.reader(io.StringIO(table.csv("real")))) == [
        ["name", "a (ms)", "kind"],
        ["x, y", "12.35", "real"],
        ["z", "", "real"],
    ]


def test_runs_that_are_not_valid_are_shown_and_have_no_rank(results):
    assert ranks(results, TTFT, 2.0) == {"(E-P)-D": 1, "E-P-D": 1, "TP1x2": 3}
    assert ranks(results, TTFT, 4.0) == {"(E-P)-D": 1, "TP1x2": 2}
    lines = tables.rates(results).lines
    assert [line["rank by mean TTFT"] for line in lines] == [3, 2, 1, 1, 1, None]
    assert [line["valid"] for line in lines] == [True] * 5 + [False]


def test_throughput_is_ranked_per_device(results):
    assert ranked(results, THROUGHPUT_PER_DEVICE, 2.0)[-1][0].deployment == WIDE


def test_table_5_is_of_the_highest_rate_that_half_have(results):
    assert tables.chosen_rate(results) == 4.0
    mono, fast, bad = tables.table5(results, 4.0).lines
    attained, effective = (
        "SLO attainment, TTFT ≤ 2000 ms, 90 % of its token gaps ≤ 50 ms (%)",
        "effective throughput per device, 2000:50:p90",
    )

    assert (mono[attained], fast[attained]) == (0.0, 100.0)
    tokens_per_s = results.at(FAST, 4.0).figure("output_tokens_per_s")
    assert fast[f"{effective} (output tokens/s)"] == pytest.approx(tokens_per_s / 2, rel=1e-3)
    assert bad["mean TTFT (ms)"] is None and bad["valid"] is False


def test_a_rate_that_nobody_measured_is_refused(results):
    with pytest.raises(ConfigError, match=r"--rate 3: nothing was measured at it, but at 2, 4"):
        tables.chosen_rate(results, 3.0)


def test_goodput_is_a_measured_rate(results):
    slow, loose = PAPER[0], Slo(60000, 1000)

    assert tables.goodput_of(results, MONO, slow) == (None, 2.0)
    assert tables.goodput_of(results, MONO, loose) == (None, None)  # nobody asked for it
    assert tables.goodput_of(results, FAST, slow) == (4.0, None)
    assert tables.goodput_of(results, WIDE, slow) == (2.0, None)  # its 4 req/s is not valid
    lines = {(line["deployment"], line["objective (TTFT:TPOT, ms)"]): line for line in tables.goodput(results).lines}
    assert lines["(E-P)-D", "2000:50:p90"]["goodput per device (req/s)"] == 2.0


def line_of(table, **fields):
    (found,) = [line for line in table.lines if all(line[name] == value for name, value in fields.items())]
    return found


def test_the_best_is_named_with_its_ratio_to_the_second_and_the_interval(tmp_path):
    best = line_of(tables.best(sweep(tmp_path, [MONO, FAST], {"TP1x2": 0.4, "(E-P)-D": 0.2})), metric="mean TTFT (ms)")

    assert (best["best"], best["second"]) == ("(E-P)-D", "TP1x2")
    assert best["best over second"] == pytest.approx(0.5)
    assert (best["best over second: from"], best["best over second: to"]) == pytest.approx((0.5, 0.5))
    assert best["best over second: is"] == "better"


def test_another_device_count_is_not_among_the_best_and_has_ratios(tmp_path):
    found = sweep(tmp_path, [MONO, WIDE, FAST], {"TP1x2": 0.4, "E-P-D": 0.2, "(E-P)-D": 0.3})
    best = line_of(tables.best(found), metric="mean TTFT (ms)")

    assert (best["best"], best["second"]) == ("(E-P)-D", "TP1x2")
    wide = line_of(tables.ratios(found), deployment="E-P-D", metric="mean TTFT (ms)")
    assert (wide["ratio"], wide["ratio: is"]) == (pytest.approx(0.5), "better")
    each = line_of(tables.ratios(found), deployment="E-P-D", metric="throughput per device (output tokens/s)")
    assert each["ratio"] == pytest.approx(2 / 3, rel=0.04) and each["ratio: is"] == "worse"


@pytest.mark.parametrize(("ttft", "verdict"), [(0.198, "no difference shown"), (0.4, "worse"), (0.1, "better")])
def test_a_difference_that_nobody_would_choose_by_is_none(tmp_path, ttft, verdict):
    found = sweep(tmp_path, [MONO, FAST], {"TP1x2": 0.2, "(E-P)-D": ttft})
    line = line_of(tables.ratios(found), metric="mean TTFT (ms)")

    assert (line["ratio"], line["ratio: is"]) == (pytest.approx(ttft / 0.2), verdict)


def test_few_requests_have_a_ratio_and_no_interval(tmp_path):
    found = sweep(tmp_path, [MONO, FAST], {"TP1x2": 0.2, "(E-P)-D": 0.4}, count=8)
    line = line_of(tables.ratios(found), metric="mean TTFT (ms)")

    assert line["ratio"] == pytest.approx(2.0) and line["ratio: from"] is None and line["ratio: is"] == "no interval"


def test_of_no_good_answer_there_is_no_best(tmp_path):
    found = sweep(tmp_path, [MONO, FAST], TTFTS, bad=[("TP1x2", 4.0), ("(E-P)-D", 4.0)])

    assert tables.best(found).lines == [] == tables.ratios(found).lines


def test_without_a_monolith_the_best_is_held_against_the_second_alone(tmp_path):
    found = sweep(tmp_path, [deployment("EP-D"), FAST], {"EP-D": 0.4, "(E-P)-D": 0.2})
    best = line_of(tables.best(found), metric="mean TTFT (ms)")

    assert monolith(found) is None and tables.ratios(found).lines == []
    assert best["best over second"] == pytest.approx(0.5)


def test_the_monolith_is_a_baseline_of_whole_instances_of_the_usual_size(tmp_path):
    three = [
        deployment("TP1x2"),
        deployment("one", 3, layout="TP1x3", baseline=True),
        deployment("two", layout="TP1x2", baseline=True),
    ]

    assert monolith(sweep(tmp_path, three, dict.fromkeys(("TP1x2", "one", "two"), 0.2), count=12)) == three[2]


def test_batches_have_a_line_for_each_role(tmp_path):
    asked(tmp_path, [FAST], rates=(4.0,))
    batch = {"D": {"running": {"mean": 2.0, "p10": 1.0, "p90": 3.0}, "waiting": 0.0}}
    measured(tmp_path, FAST, {"4 rps": requests("4 rps", 4)}, batches={"4 rps": batch})
    (line,) = tables.batches(read_sweep(tmp_path)).lines

    assert (line["role"], line["running, mean (sequences)"], line["running, P90"]) == ("D", 2.0, 3.0)


def test_phases_have_a_line_each_and_say_how_the_migrations_do(tmp_path):
    asked(tmp_path, [MONO, FAST], rates=(4.0,))
    for one, taken in ((MONO, FUSED), (FAST, {**SPLIT, "E→P": 1.0, "P→D": 9.0})):
        rows = requests("4 rps", 4)
        lines = [phases_line(row.id, "4 rps", taken) for row in rows]
        measured(tmp_path, one, {"4 rps": rows}, phases=lines)
    lines = {(line["deployment"], line["phase"]): line for line in tables.phases(read_sweep(tmp_path)).lines}
    encode, sent = lines["(E-P)-D", "encode"], lines["(E-P)-D", "P→D"]

    assert (encode["mean ms"], encode["P95 ms"], sent["exposed ms"]) == (30.0, 30.0, 9.0)
    assert lines["(E-P)-D", "E→P"]["goal"].endswith("met") and sent["goal"].endswith("MISSED")
    assert lines["TP1x2", "prefill"]["mean ms"] == 199.0 and ("TP1x2", "encode") not in lines
