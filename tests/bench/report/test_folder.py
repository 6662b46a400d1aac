"""The results folder as types, whole, interrupted and broken."""

from __future__ import annotations

import json

import pytest

from bench.client.slo import PAPER
from bench.report import folder
from bench.report.experiment import rate_of
from epd_serve.errors import ConfigError
from tests.bench.report.folders import asked, entry, measured, requests


@pytest.fixture
def whole(tmp_path):
    mono, split = entry("TP1x2", baseline=True), entry("E-P-D", 3)
    at = asked(tmp_path / "results", [mono, split])
    for one, ttft in ((mono, 0.4), (split, 0.2)):
        runs = {f"{rate:g} rps": requests(f"{rate:g} rps", rate, ttft=ttft) for rate in (2, 4)}
        traced = [{"id": "2 rps-0", "run": "2 rps", "path": "E-P-D", "phases_ms": {"P: forward pass": 12.5}}]
        sampled = [{"run": "2 rps", "t_s": 1.5, "instance": "P0", "role": "P", "running": 3, "waiting": 1}]
        measured(at, one, runs, phases=traced, batches=sampled)
    return at


def test_entries_come_with_their_runs_and_figures(whole):
    found = folder.read(whole)

    assert (found.kind, found.real, found.workload, found.slos) == ("real", True, "sharegpt4o-like", PAPER)
    assert [(one.name, one.devices, one.baseline) for one in found.entries] == [("TP1x2", 2, True), ("E-P-D", 3, False)]
    assert found.entries[1].known_as == "E-P-D, 3 devices"
    assert found.entries[1].ready_s == 12.5
    assert found.measured_rates == (2.0, 4.0)
    run = found.at(found.entries[1], 4.0)
    assert run.label == "4 rps" and run.valid
    assert run.attainment(PAPER[0]) == 1.0
    assert 200 < run.figure("ttft_ms", "mean") < 400
    assert run.figure("ttft_ms", "p12") is None
    assert found.problems == ()


def test_large_files_are_read_on_their_own(whole):
    first = folder.read(whole).entries[0]

    assert len(folder.rows(first)) == 80
    assert folder.phases(first)[0].phases_ms == {"P: forward pass": 12.5}
    assert folder.batches(first)[0].running == 3


def test_rates_per_device_are_told_from_totals(whole):
    plain = json.loads((whole / "experiment.json").read_text())
    (whole / "experiment.json").write_text(json.dumps({**plain, "rates_are": "per_device", "rates": [1, 2, 4 / 3]}))
    found = folder.read(whole)
    two, three = found.entries

    assert [found.rate(two, run) for run in two.runs] == [1.0, 2.0]
    assert [found.rate(three, run) for run in three.runs] == [2 / 3, 4 / 3]
    assert found.rate_words == "request rate (req/s per device)"


def test_of_a_rate_measured_twice_the_last_valid_run_counts(tmp_path):
    mono = entry("TP1")
    labels = {"2 rps": True, "2 rps (2)": True, "2 rps (3)": False}
    measured(
        asked(tmp_path, [mono], rates=[2]),
        mono,
        {label: requests(label, 2, good=good) for label, good in labels.items()},
    )
    found = folder.read(tmp_path)

    assert found.at(found.entries[0], 2.0).label == "2 rps (2)"
    assert [run.label for _, run in found.invalid()] == ["2 rps (3)"]


def test_an_interrupted_experiment_says_what_is_missing(tmp_path):
    done, begun, never = entry("TP1x2"), entry("(E-PD)x2"), entry("E-P-D")
    at = asked(tmp_path, [done, begun, never])
    measured(at, done, {f"{rate:g} rps": requests(f"{rate:g} rps", rate) for rate in (2, 4)})
    measured(at, begun, {"2 rps": requests("2 rps", 2)})
    found = folder.read(tmp_path)

    assert found.problems == ("(E-PD)x2: was not measured at 4 req/s", "E-P-D: was not measured")
    assert found.at(found.entries[1], 4.0) is None
    assert folder.rows(found.entries[2]) == folder.phases(found.entries[2]) == folder.batches(found.entries[2]) == []


def test_a_result_of_no_entry_is_said_and_left_out(tmp_path):
    measured(asked(tmp_path, []), entry("old"), {"2 rps": requests("2 rps", 2)})

    assert folder.read(tmp_path).problems == ("old: has a result, and is no entry of experiment.json: left out",)


def test_half_a_line_at_the_end_is_left_out(whole):
    first = folder.read(whole).entries[0]
    with (first.folder / "batches.jsonl").open("a") as file:
        file.write('{"run": "2 rp')

    assert len(folder.batches(first)) == 1


def test_another_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"has no experiment\.json: name the folder"):
        folder.read(tmp_path)


def test_a_broken_file_is_named_with_its_line(whole):
    first = folder.read(whole).entries[0]
    (first.folder / "phases.jsonl").write_text('{"id": "a", "run": "r", "phases_ms": {}}\n{"id": "a"}\n')
    with pytest.raises(ConfigError, match=r"phases\.jsonl:2 is no phases of a request: it has no 'phases_ms'"):
        folder.phases(first)
    (first.folder / "result.json").write_text('{"figures": {},\n"env": nothing}')
    with pytest.raises(ConfigError, match=r"result\.json:2 is no JSON"):
        folder.read(whole)
    (first.folder / "result.json").write_text('{"figures": {}, "env": {}, "rows": []}')
    with pytest.raises(ConfigError, match=r"result\.json is no result of an entry: it has no 'entry'"):
        folder.read(whole)


@pytest.mark.parametrize(
    ("plain", "words"),
    [
        ({"entries": []}, "it has no 'kind'"),
        ({"kind": "real", "entries": [{"name": "a"}]}, "it has no 'devices'"),
        ({"kind": "real", "entries": [{"name": "a", "devices": 0}]}, "'a' has devices 0"),
        ({"kind": "real", "entries": [{"name": "a", "devices": 1}], "rates": ["x"]}, "could not convert"),
    ],
)
def test_an_experiment_that_is_none_is_refused(tmp_path, plain, words):
    (tmp_path / "experiment.json").write_text(json.dumps(plain))

    with pytest.raises(ConfigError, match=words):
        folder.read(tmp_path)


def test_a_closed_loop_has_no_rate():
    assert [rate_of(label) for label in ("2.5 rps", "4 rps (2)", "16 at once", "trace")] == [2.5, 4.0, None, None]
