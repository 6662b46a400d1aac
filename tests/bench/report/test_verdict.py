"""What an experiment says, in sentences."""

from __future__ import annotations

import pytest

from bench.report import folder
from bench.report.breakdown import breakdown
from bench.report.ratios import Compared, monolith
from bench.report.verdict import verdict
from tests.bench.report.folders import asked, entry, measured, requests
from tests.bench.report.test_breakdown import FUSED, SPLIT


def said(at, entries, ttfts, *, kind="real", traced=False, rate=4, good=True):
    asked(at, entries, rates=[rate], kind=kind)
    label = f"{rate} rps"
    for one in entries:
        rows = requests(label, rate, ttft=ttfts[one["name"]], good=good)
        phases = SPLIT if "-" in one["name"] else FUSED
        lines = [{"id": row.id, "run": label, "phases_ms": phases} for row in rows] if traced else None
        sampled = [{"run": label, "t_s": 1, "instance": "D0", "role": "D", "running": 3, "waiting": 0}]
        measured(at, one, {label: rows}, phases=lines, batches=sampled)
    experiment = folder.read(at)
    rows = {one.name: folder.rows(one) for one in experiment.entries}
    taken = {}
    for one in experiment.entries:
        found = breakdown(folder.phases(one), rows[one.name])
        taken[one.name] = {float(rate): found} if found else {}
    sampled = {one.name: folder.batches(one) for one in experiment.entries}
    return verdict(experiment, Compared(experiment, rows), taken, sampled)


TWO = {"TP1x2": 0.4, "(E-P)-D": 0.2}


def test_the_best_wins_with_its_ratio_and_interval(tmp_path):
    text = said(tmp_path, [entry("TP1x2", baseline=True), entry("(E-P)-D")], TWO).text()

    assert "At 4 req/s: (E-P)-D has the lowest mean TTFT of those with 2 devices" in text
    assert "0.50 times, 0.50 to 0.50" in text
    assert "Wins against the monolith\n  (E-P)-D: mean TTFT at 4 req/s" in text
    assert "no deployment differs from the best in mean TPOT beyond chance" in text
    assert "No request was traced: the figures do not say why." in text


def test_losses_are_said_as_plainly(tmp_path):
    slower = {"TP1x2": 0.2, "(E-P)-D": 0.4}
    text = said(tmp_path, [entry("TP1x2", baseline=True), entry("(E-P)-D")], slower).text()

    assert "TP1x2 has the lowest mean TTFT of those with 2 devices; it is the monolith." in text
    assert "Losses against the monolith\n  (E-P)-D: mean TTFT at 4 req/s: 2.00 times" in text
    assert "Wins" not in text


@pytest.mark.parametrize("kind", ["emulated 910b", "simulated"])
def test_what_is_not_real_has_an_order_and_no_winner(tmp_path, kind):
    found = said(tmp_path, [entry("TP1x2", baseline=True), entry("(E-P)-D")], TWO, kind=kind)
    told = found.text().removeprefix(found.caution)

    assert found.caution == f"{kind}: ordering only. No device was measured, and nothing here is a win."
    assert "Ordered before the monolith" in told
    assert not any(word in told.lower() for word in (" win", "wins", "loss", "loses"))


def test_another_device_count_is_named_and_not_mixed_in(tmp_path):
    three = {"TP1x2": 0.4, "E-P-D": 0.2, "EP-D": 0.3}
    text = said(tmp_path, [entry("TP1x2", baseline=True), entry("E-P-D", 3), entry("EP-D")], three).text()

    assert "EP-D has the lowest mean TTFT of those with 2 devices" in text
    assert "E-P-D (3 devices against 2): mean TTFT at 4 req/s" in text


def test_the_phase_that_differs_most_says_why(tmp_path):
    entries = [entry("TP1x2", baseline=True), entry("(E-P)-D")]
    text = said(tmp_path, entries, TWO, traced=True).text()

    assert "ms sooner than TP1x2: what differs most is all that stages do until the first token" in text
    assert "(of which (E-P)-D has 60 ms in prefill)" in text


def test_what_decoding_instances_run_is_said_of_tpot(tmp_path):
    text = said(tmp_path, [entry("TP1x2", baseline=True), entry("(E-D)-P")], {"TP1x2": 0.4, "(E-D)-P": 0.2}).text()
    assert "TPOT at" not in text  # nothing differs

    one, two = entry("TP1x2", baseline=True), entry("(E-D)-P")
    at = asked(tmp_path / "more", [one, two], rates=[4])
    for which, gap, role in ((one, 0.04, "EPD"), (two, 0.02, "D")):
        sampled = [{"run": "4 rps", "t_s": 1, "instance": "a", "role": role, "running": 3, "waiting": 0}]
        measured(at, which, {"4 rps": requests("4 rps", 4, gap=gap)}, batches=sampled)
    found = folder.read(at)
    rows = {each.name: folder.rows(each) for each in found.entries}
    batches = {each.name: folder.batches(each) for each in found.entries}
    text = verdict(found, Compared(found, rows), {}, batches).text()

    assert "20 ms in (E-D)-P, whose D only decodes on a device that it shares and runs 3 sequences" in text
    assert "40 ms in TP1x2, whose EPD also has encode and prefill to do and runs 3 sequences" in text


def test_of_no_good_answer_nothing_is_said(tmp_path):
    text = said(tmp_path, [entry("TP1x2"), entry("(E-P)-D")], TWO, good=False).text()

    assert text == "Result\n  No run is valid: there is nothing to compare."


def test_a_difference_that_nobody_would_choose_by_is_no_win(tmp_path):
    text = said(tmp_path, [entry("TP1x2", baseline=True), entry("EP-D")], {"TP1x2": 0.2, "EP-D": 0.198}).text()

    assert "no deployment differs from the best in mean TTFT beyond chance" in text
    assert "Wins" not in text


def test_without_a_monolith_there_are_no_ratios(tmp_path):
    text = said(tmp_path, [entry("EP-D"), entry("(E-P)-D")], {"EP-D": 0.4, "(E-P)-D": 0.2}).text()

    assert "(E-P)-D has the lowest mean TTFT" in text
    assert "No monolith was measured" in text


def test_the_monolith_is_a_baseline_of_whole_instances_of_the_usual_size(tmp_path):
    entries = [
        entry("TP1x2"),
        entry("one", 3, layout="TP1x3", baseline=True),
        entry("two", layout="TP1x2", baseline=True),
    ]
    asked(tmp_path, entries, rates=[4])
    for one in entries:
        measured(tmp_path, one, {"4 rps": requests("4 rps", 4, count=12)})
    found = monolith(folder.read(tmp_path))

    assert found is not None and found.name == "two"
