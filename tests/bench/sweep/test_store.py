"""The folder of an experiment: what is finished stays, what is not goes when it is measured again."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest

from bench.clients.measure import Rules
from bench.sweep.experiment import deployments
from bench.sweep.store import PHASES, RESULT, ROWS, ResultStore, difference, opened
from epd_serve.errors import ConfigError
from epd_serve.slo import Slo
from tests.bench.sweep.experiments import ENV, experiment, run_row

ASKED = experiment()
DEPLOYMENT = ASKED.deployments[0]


def runs_in(path):
    return [json.loads(line)["run"] for line in path.read_text().splitlines()]


def test_a_run_is_finished_when_the_result_has_it(tmp_path):
    store = ResultStore(tmp_path / "e", DEPLOYMENT)
    assert [run.label for run in store.missing(ASKED)] == ["1 rps", "2 rps"]

    store.begin(ENV)
    store.keep(run_row("1 rps"), {"1 rps/ok": 3.0})

    again = ResultStore(tmp_path / "e", DEPLOYMENT)
    assert [run.label for run in again.missing(ASKED)] == ["2 rps"]
    assert again.figures == {"1 rps/ok": 3.0}


def test_what_an_unfinished_run_left_stays_until_it_is_measured_again(tmp_path):
    store = ResultStore(tmp_path, DEPLOYMENT)
    store.begin(ENV)
    store.keep(run_row("1 rps"), {})
    for name in (ROWS, PHASES):
        (tmp_path / name).write_text('{"run":"1 rps"}\n{"run":"2 rps"}\n{"run":"2 r')

    again = ResultStore(tmp_path, DEPLOYMENT)
    assert (tmp_path / ROWS).read_text().count("2 rps") == 1
    again.begin(ENV)

    assert [runs_in(tmp_path / name) for name in (ROWS, PHASES)] == [["1 rps"]] * 2


def test_each_session_is_remembered_with_the_load_that_it_met(tmp_path):
    for load in (0.1, 1.5):
        store = ResultStore(tmp_path, DEPLOYMENT)
        store.begin({**ENV, "machine": {"load_average_1min": load}})
        store.keep(run_row(f"{load} rps"), {})

    assert [one["machine"]["load_average_1min"] for one in ResultStore(tmp_path, DEPLOYMENT).env["sessions"]] == [
        0.1,
        1.5,
    ]


def test_a_failure_is_kept_until_the_next_session(tmp_path):
    store = ResultStore(tmp_path, DEPLOYMENT)
    assert store.failure == ""
    store.fail("PD0 did not start: no memory")
    assert ResultStore(tmp_path, DEPLOYMENT).failure == "PD0 did not start: no memory"
    store.begin(ENV)
    assert ResultStore(tmp_path, DEPLOYMENT).failure == ""


def test_a_result_that_cannot_be_written_is_told_and_the_one_before_it_stays(tmp_path):
    store = ResultStore(tmp_path, DEPLOYMENT)
    store.keep(run_row("1 rps"), {})
    before = (tmp_path / RESULT).read_bytes()
    (tmp_path / f".{RESULT}.{os.getpid()}").mkdir()  # a disk that is full says no as well

    with pytest.raises(ConfigError, match="what was there before is kept"):
        store.keep(run_row("2 rps"), {})
    assert (tmp_path / RESULT).read_bytes() == before


def test_a_broken_result_is_named_with_the_way_out(tmp_path):
    (tmp_path / RESULT).write_text("{")
    with pytest.raises(ConfigError, match=r"result\.json cannot be read"):
        ResultStore(tmp_path, DEPLOYMENT)
    (tmp_path / RESULT).write_text("{}")
    with pytest.raises(ConfigError, match="missing required field"):
        ResultStore(tmp_path, DEPLOYMENT)


def test_answers_are_kept_for_those_that_come_later(tmp_path):
    ResultStore(tmp_path, DEPLOYMENT).keep_answers([[1, 2], [3]])
    assert ResultStore(tmp_path, DEPLOYMENT).answers == [[1, 2], [3]]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rates": (1.0, 3.0)}, r"rates was \[1.0, 2.0\], is \[1.0, 3.0\]"),
        ({"seed": 7}, "seed was 0, is 7"),
        ({"slos": (Slo(1, 2),)}, r"slos was .*2000.*, is .*1, \"tpot_ms\": 2, \"judge\": \"p90\""),
        ({"per_device": True}, "per_device was false, is true"),
        ({"knobs": {"reuse": 0.5}}, "knobs/reuse was not given, is 0.5"),
        ({"deployments": deployments("TP1x2")}, r"deployments/\(E-P\)-D/name was .*, is not given"),
        ({"deployments": deployments("TP1x2,(E-P)-D", flags=("--x",))}, r"deployments/TP1x2/flags was \[\], is"),
        ({"rules": Rules(late_ms=5.0)}, "rules/late_ms was 100.0, is 5.0"),
    ],
)
def test_another_experiment_is_refused_with_the_field_that_differs(tmp_path, change, said):
    for _ in range(2):
        with opened(tmp_path / "out", experiment()) as stores:
            assert [store.deployment.name for store in stores] == ["TP1x2", "(E-P)-D"]

    with (
        pytest.raises(ConfigError, match=f"{said}.*remove the folder"),
        opened(tmp_path / "out", replace(experiment(), **change)),
    ):
        pass


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match=r"holds thesis\.tex"), opened(tmp_path, experiment()):
        pass
    assert (tmp_path / "thesis.tex").exists()


def test_two_processes_do_not_measure_into_one_folder(tmp_path):
    with (
        opened(tmp_path, experiment()),
        pytest.raises(ConfigError, match="another epd-bench"),
        opened(tmp_path, experiment()),
    ):
        pass


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"figures": {}, "env": {}, "rows": [1]}'])
def test_a_file_that_is_no_result_is_refused(tmp_path, text):
    (tmp_path / RESULT).write_text(text)
    with pytest.raises(ConfigError, match=r"result\.json"):
        ResultStore(tmp_path, DEPLOYMENT)


def test_the_first_field_that_differs_is_named_with_both_values():
    assert difference({"a": 1, "slo": ["1:2"]}, {"a": 1, "slo": ["1:2"]}) == ""
    assert difference({"warm_up": None}, {"warm_up": 2.0}) == "warm_up was not given, is 2.0"
    assert difference({"gone": 1}, {}) == "gone was 1, is not given"
