"""Cells, ranks, Table 5, goodput: what is printed, and that files and pages print the same."""

from __future__ import annotations

import csv
import io
from xml.etree import ElementTree

import pytest

from bench.client.slo import PAPER, Slo
from bench.report import deployments, folder, radar, scatter
from bench.report.measures import THROUGHPUT_PER_DEVICE, TTFT, ranked, ranks
from bench.report.sheet import NOTHING, Sheet, shown
from epd_serve.errors import ConfigError
from tests.bench.report.folders import asked, entry, measured, requests


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    at = tmp_path_factory.mktemp("results")
    mono, fast, wide = entry("TP1x2", baseline=True), entry("(E-P)-D"), entry("E-P-D", 3)
    asked(at, [mono, fast, wide])
    of = {"TP1x2": (1.5, 0.06), "(E-P)-D": (0.2, 0.01), "E-P-D": (0.2, 0.01)}
    for one in (mono, fast, wide):
        ttft, gap = of[one["name"]]
        runs = {"2 rps": requests("2 rps", 2, ttft=ttft, gap=0.01 if one is mono else gap, count=20)}
        good = one is not wide
        runs["4 rps"] = requests("4 rps", 4, ttft=ttft, gap=gap, count=20, good=good)
        measured(at, one, runs)
    return folder.read(at)


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (None, NOTHING),
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


def test_the_page_and_the_file_print_the_same():
    sheet = Sheet("s", "Title <1>", ("name", "a (ms)"), (("x & y", 12.3456), ("z", None)), faint=frozenset({1}))
    rows = list(csv.reader(io.StringIO(sheet.csv("real"))))
    table = ElementTree.fromstring(sheet.html("real"))
    cells = [["".join(cell.itertext()) for cell in line] for line in table.iter("tr")]

    assert rows == [["name", "a (ms)", "kind"], ["x & y", "12.35", "real"], ["z", "", "real"]]
    assert cells == [["name", "a (ms)"], ["x & y", "12.35"], ["z", NOTHING]]
    assert [line.get("class") for line in table.iter("tr")] == [None, None, "faint"]


def test_runs_that_are_not_valid_have_no_rank(experiment):
    assert ranks(experiment, TTFT, 2.0) == {"(E-P)-D": 1, "E-P-D": 1, "TP1x2": 3}
    assert ranks(experiment, TTFT, 4.0) == {"(E-P)-D": 1, "TP1x2": 2}
    assert [row[:3] for row in radar.sheet(experiment).rows if row[0] == "E-P-D"] == [
        ("E-P-D", 3, 2.0),
        ("E-P-D", 3, 4.0),
    ]
    assert radar.sheet(experiment).rows[-1][3:] == (None, None, None)


def test_throughput_is_ranked_per_device(experiment):
    assert [entry.name for entry, *_ in ranked(experiment, THROUGHPUT_PER_DEVICE, 2.0)][-1] == "E-P-D"


def test_table_5_is_of_the_highest_rate_that_half_have_and_marks_what_is_not_valid(experiment):
    assert deployments.chosen_rate(experiment) == 4.0
    sheet = deployments.deployments(experiment, 4.0, PAPER[:1])

    assert [row[0] for row in sheet.rows] == ["TP1x2", "(E-P)-D", "E-P-D"]
    assert sheet.faint == {2}
    mono, fast, bad = sheet.rows
    assert mono[6] == 0.0 and fast[6] == 100.0
    assert fast[7] == pytest.approx(experiment.entries[1].runs[1].tokens_per_s / 2, rel=1e-3)
    assert bad[2] is None and bad[-1] is False


def test_a_rate_that_nobody_measured_is_refused(experiment):
    with pytest.raises(ConfigError, match=r"--rate 3: nothing was measured at it, but at 2, 4"):
        deployments.chosen_rate(experiment, 3.0)


def test_goodput_is_a_measured_rate_and_says_what_it_is_not(experiment):
    slow, loose = PAPER[0], Slo(60000, 1000)

    assert deployments.goodput_of(experiment, experiment.entries[0], slow) == (None, 2.0)
    assert deployments.goodput_of(experiment, experiment.entries[0], loose) == (None, None)  # nobody asked for it
    assert deployments.goodput_of(experiment, experiment.entries[1], slow) == (4.0, None)
    assert deployments.goodput_of(experiment, experiment.entries[2], slow) == (2.0, None)  # its 4 req/s is not valid
    words = {(row[0], row[2]): row[6] for row in deployments.goodput(experiment).rows}
    assert words["TP1x2", "TTFT ≤ 2000 ms, TPOT ≤ 50 ms"] == "no measured rate attains it"
    assert words["(E-P)-D", "TTFT ≤ 2000 ms, TPOT ≤ 50 ms"] == "at least: no higher rate was measured"


def test_the_best_three_of_each_rate_are_named(experiment):
    sheet = scatter.best_sheet(experiment, scatter.FIGURES[0])

    assert sheet.rows[1][1] == "(E-P)-D (2)" and sheet.rows[1][3] == "TP1x2 (2)" and sheet.rows[1][5] is None


def test_every_whole_answer_is_a_dot(experiment):
    rows = {one.name: folder.rows(one) for one in experiment.entries}
    sheet = scatter.sheet(experiment, rows, scatter.FIGURES[0])

    assert len(sheet.rows) == 5 * 20  # of six runs one has no answer
    assert sheet.long
