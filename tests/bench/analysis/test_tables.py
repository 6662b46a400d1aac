"""Cells, rates, goodput, ratios and phases: numbers and fields."""

from __future__ import annotations

import pytest

from bench.analysis import tables
from bench.analysis.sweep_results import read_sweep
from bench.analysis.tables import shown
from bench.clients.slo import PAPER
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
        (-0.5, "-0.5"),
    ],
)
def test_numbers_have_four_digits(cell, text):
    assert shown(cell) == text


def test_a_figure_that_is_no_number_is_never_printed():
    with pytest.raises(AssertionError):
        shown(float("nan"))


def test_runs_that_are_not_valid_are_shown_and_say_so(results):
    assert [line["valid"] for line in tables.rates(results).lines] == [True] * 5 + [False]


def test_table_5_is_in_the_rates(results):
    (fast,) = [run for run in results.of(FAST) if run.rate == 4.0]
    mono, of_fast, bad = [line for line in tables.rates(results).lines if line["request rate (req/s)"] == 4.0]
    attained, effective = (
        "SLO attainment, TTFT ≤ 2000 ms, 90 % of its token gaps ≤ 50 ms (%)",
        "effective throughput per device, 2000:50:p90",
    )

    assert (mono[attained], of_fast[attained]) == (0.0, 100.0)
    tokens_per_s = fast.figure("output_tokens_per_s")
    assert of_fast[f"{effective} (output tokens/s)"] == pytest.approx(tokens_per_s / 2, rel=1e-3)
    assert bad["mean TTFT (ms)"] is None and bad["valid"] is False


def test_ratios_are_to_servers_on_as_many_devices(tmp_path):
    found = sweep(tmp_path, [MONO, WIDE, FAST], {"TP1x2": 0.4, "E-P-D": 0.2, "(E-P)-D": 0.3})
    (line,) = tables.ratios(found).lines

    assert line["deployment"] == "(E-P)-D" and line["ttft_over_vllm"] == pytest.approx(0.75, abs=1e-3)


def test_of_no_good_answer_there_is_no_ratio(tmp_path):
    assert tables.ratios(sweep(tmp_path, [MONO, FAST], TTFTS, bad=[("TP1x2", 4.0), ("(E-P)-D", 4.0)])).lines == []


def test_goodput_is_a_measured_rate(results):
    slow, loose = PAPER[0], Slo(60000, 1000)

    assert tables.goodput_of(results, MONO, slow) == (None, 2.0)
    assert tables.goodput_of(results, MONO, loose) == (None, None)  # nobody asked for it
    assert tables.goodput_of(results, FAST, slow) == (4.0, None)
    assert tables.goodput_of(results, WIDE, slow) == (2.0, None)  # its 4 req/s is not valid
    lines = {(line["deployment"], line["objective (TTFT:TPOT, ms)"]): line for line in tables.goodput(results).lines}
    assert lines["(E-P)-D", "2000:50:p90"]["goodput per device (req/s)"] == 2.0


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
