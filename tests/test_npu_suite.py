"""The parts of `tests/npu` that need no card: who collects it, how answers are compared, what the report holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.npu import run
from tests.npu.card import read_card
from tests.npu.report import Report, shown_environment
from tests.npu.stages.answers import (
    LEAST_NEAR_TIE,
    MOST_NEAR_TIE,
    Answer,
    Place,
    difference,
    first_difference,
    is_near_tie,
    near_tie_of,
    noise,
)
from tests.npu.stages.launches import PLANNED, why_not

ROOT = Path(__file__).resolve().parents[1]


def answer(*ids: int, runner_up: int = 99, lead: float = 2.0) -> Answer:
    """An answer that preferred each token to `runner_up` by `lead`."""
    return tuple(Place(one, -0.1, ((one, -0.1), (runner_up, -0.1 - lead))) for one in ids)


def collected(tree: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-c", str(ROOT / "pyproject.toml")]
    done = subprocess.run(
        [*command, "--rootdir", str(tree), *arguments], cwd=tree, capture_output=True, text=True, timeout=120
    )
    return done.stdout


def test_folders_called_npu_are_entered_only_where_they_are_named(pytestconfig):
    patterns = pytestconfig.getini("norecursedirs")

    assert any(fnmatch("npu", pattern) for pattern in patterns)
    assert not any(fnmatch("npu_ops", pattern) for pattern in patterns)


@pytest.mark.slow
def test_tests_that_need_a_card_are_collected_only_where_they_are_named(tmp_path):
    for folder in ("npu/stages", "npu_ops"):
        (tmp_path / "tests" / folder).mkdir(parents=True)
        (tmp_path / "tests" / folder / f"test_{folder[:3]}_{folder[-3:]}.py").write_text("def test_it(): ...\n")

    everything = collected(tmp_path, "tests")
    assert "test_npu_ops.py" in everything
    assert "test_npu_ges.py" not in everything
    assert "test_npu_ges.py" in collected(tmp_path, "tests/npu")


def test_equal_answers_differ_nowhere():
    assert first_difference(answer(1, 2, 3), answer(1, 2, 3)) is None
    assert difference(answer(1, 2, 3), answer(1, 2, 3)) == ""
    assert is_near_tie(answer(1, 2, 3), answer(1, 2, 3), near_tie=0.0)


def test_a_token_that_the_monolith_nearly_chose_is_a_near_tie_and_is_told_with_its_margin():
    ours, right = answer(1, 99, 7), answer(1, 2, 3, lead=0.125)

    assert first_difference(ours, right) == 1
    assert is_near_tie(ours, right, near_tie=0.2)
    assert not is_near_tie(ours, right, near_tie=0.1)
    assert "token 1 is 99" in difference(ours, right)
    assert "preferred by 0.1250" in difference(ours, right)


def test_a_token_that_the_monolith_did_not_think_of_is_never_a_near_tie():
    assert not is_near_tie(answer(1, 5), answer(1, 2, lead=0.01), near_tie=MOST_NEAR_TIE)


def test_an_answer_cut_short_is_no_near_tie():
    assert not is_near_tie(answer(1, 2), answer(1, 2, 3), near_tie=MOST_NEAR_TIE)
    assert difference(answer(1, 2), answer(1, 2, 3)) == "2 tokens instead of 3, equal up to there"


def test_the_noise_of_a_monolith_is_how_far_its_logprobs_move_while_the_tokens_are_the_same():
    moved = (Place(1, -0.1, ()), Place(2, -0.15, ()), Place(8, -3.0, ()))

    assert noise(answer(1, 2, 3), moved) == pytest.approx(0.05)
    assert noise(answer(1), answer(1)) == 0.0
    assert near_tie_of([0.0]) == LEAST_NEAR_TIE
    assert near_tie_of([0.02, 0.05]) == pytest.approx(0.2)
    assert near_tie_of([3.0]) == MOST_NEAR_TIE


def test_layouts_that_do_not_fit_are_skipped_by_name(monkeypatch):
    monkeypatch.setenv("EPD_TEST_DEVICE", "cpu")
    monkeypatch.setenv("EPD_TEST_DEVICES", "1")
    one = read_card()
    monkeypatch.setenv("EPD_TEST_DEVICES", "2")
    two = read_card()

    assert [name for name in PLANNED if not why_not(name, one)] == ["(E-PD)", "(E-PD), core shares", "(E-P-D)"]
    assert [name for name in PLANNED if not why_not(name, two)] == [
        "(E-PD)",
        "(E-PD), core shares",
        "(E-P)-D, core shares",
    ]
    assert why_not("E-P-D", two) == "E-P-D takes 3 devices, there are 2"


def test_an_unknown_kind_of_device_is_refused(monkeypatch):
    monkeypatch.setenv("EPD_TEST_DEVICE", "tpu")
    with pytest.raises(ValueError, match="one of npu, cuda, cpu"):
        read_card()


def test_without_a_card_the_run_says_so_in_one_line_and_writes_nothing(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("EPD_TEST_DEVICE", "npu")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("npu_ops.discovery._numbered_files", lambda *_: {})
    monkeypatch.setattr(run, "FOLDER", tmp_path / "report")

    assert run.main([]) == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert "make test-npu EPD_TEST_DEVICE=cpu" in line
    assert not (tmp_path / "report").exists()


def test_the_report_names_secrets_without_telling_them():
    told = shown_environment({"VLLM_API_KEY": "sk-1", "ASCEND_RT_VISIBLE_DEVICES": "0,1", "AWS_PROFILE": "mine"})

    assert told == {"ASCEND_RT_VISIBLE_DEVICES": "0,1", "VLLM_API_KEY": "(set)"}


def test_the_report_is_one_archive_of_results_figures_machine_and_the_ends_of_logs(tmp_path):
    report = Report(tmp_path / "npu-report")
    report.result(test="a", outcome="passed")
    report.figure("kv_overlap", [0.5], launch="(E-P)-D")
    report.machine("cpu", model="m")
    log = tmp_path / "P0.log"
    log.write_bytes(b"x" * 400_000 + b"the end")
    report.keep_logs("(E-P)-D, core shares", log, tmp_path / "missing.log")

    with tarfile.open(report.pack(tmp_path / "npu-report.tar.gz")) as tar:
        names = set(tar.getnames())
        machine = json.loads(tar.extractfile("npu-report/machine.json").read())
        kept = tar.extractfile("npu-report/logs/(E-P)-D_core_shares/P0.log").read()
    assert {"npu-report/results.jsonl", "npu-report/figures.jsonl"} <= names
    assert machine["model"] == "m"
    assert machine["packages"]["torch"]
    assert len(kept) == 300_000 and kept.endswith(b"the end")


ENDED_MIDWAY = """
import sys
from pathlib import Path
from tests.npu import run

folder = Path(sys.argv[1])
run.FOLDER, run.ARCHIVE, run.PYTEST = folder / "npu-report", folder / "archive", (sys.executable, folder / "waits.py")
run._doctor = lambda *_: None
sys.exit(run.main([]))
"""
WAITS = """
import os, signal, time
from pathlib import Path

try:
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(100)
except KeyboardInterrupt:
    Path(__file__).with_name("ended").touch()
"""


def test_a_run_that_is_ended_ends_its_tests_and_leaves_its_report_all_the_same(tmp_path):
    """In place of pytest runs what has it ended, and waits to be interrupted."""
    (tmp_path / "waits.py").write_text(WAITS)
    environment = {**os.environ, "EPD_TEST_DEVICE": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", ENDED_MIDWAY, tmp_path], env=environment, cwd=ROOT, timeout=120)

    assert done.returncode == 130
    assert (tmp_path / "ended").exists()
    assert tarfile.is_tarfile(tmp_path / "archive")
