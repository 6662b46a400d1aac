"""`epd-bench layouts --emulate 910b`: the folder of a measured comparison, filled in virtual time."""

from __future__ import annotations

import json

import pytest

from bench import layouts as command
from bench.analysis.results import read_result
from bench.analysis.sweep_results import read_sweep
from bench.cli import main
from bench.papers.emulation import backend
from bench.phases import Phase, request_phases
from bench.sweep.store import PHASES, RESULT

FEW = ["--rates", "2,4", "--n", "40"]


@pytest.fixture
def emulated(tmp_path, monkeypatch):
    """Runs the command without drawing and without the check against Table 5, which have tests of their own."""
    monkeypatch.setattr(command, "draw", lambda path: None)
    monkeypatch.setattr(backend, "check", lambda *_, quick: ({"rank_correlation_table5": 0.5}, [{"part": "check"}]))

    def run(*flags: str, layouts: str = "EP-D,(E-D)-P") -> int:
        return main(
            ["layouts", "--emulate", "910b", "--layouts", layouts, *FEW, "--out", str(tmp_path / "out"), *flags]
        )

    return run


def test_the_folder_is_that_of_a_measured_comparison(emulated, tmp_path):
    assert emulated("--json", str(tmp_path / "all.json")) == 0

    found = read_sweep(tmp_path / "out")
    assert found.experiment.kind.startswith("emulated Atlas 800I A2, openPangu-7B-VL")
    assert not found.experiment.real and not found.gaps
    ends = [(one.name, one.devices, len(found.of(one))) for one in found.experiment.deployments]
    assert ends == [("EP-D", 2, 2), ("(E-D)-P", 2, 2)]
    assert all(run.valid and run.figure("ttft_ms/p50") > 200 and len(run.requests) == 40 for run in found.runs)
    assert {batch.role for batch in found.runs[-1].batches} == {"E", "P", "D"}
    assert found.envs["EP-D"]["deployment"]["constants"]["step_tokens"] == 2048

    whole = json.loads((tmp_path / "all.json").read_text())
    assert whole["figures"]["rank_correlation_table5"] == 0.5
    assert whole["rows"][-1] == {"part": "check"}


def test_the_report_knows_every_phase(emulated, tmp_path):
    assert emulated() == 0

    deployment = read_sweep(tmp_path / "out").experiment.deployments[1]
    apart = read_result(tmp_path / "out" / deployment.slug / RESULT).lines(PHASES, request_phases)
    taken = [one.taken for one in apart]
    assert {Phase.ENCODE, Phase.EP, Phase.PREFILL, Phase.PD, Phase.DECODE_QUEUE} <= set(taken[0])


def test_what_is_there_is_not_emulated_again(emulated, tmp_path, capsys):
    assert emulated() == 0
    capsys.readouterr()

    assert emulated() == 0
    assert "measured already" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "layouts", "said"),
    [
        (["--baselines", "vllm"], "EP-D", "leave --baselines"),
        ([], "TP2", "stages of several devices"),
    ],
)
def test_what_cannot_be_emulated_is_refused_before_anything_is_written(
    emulated, tmp_path, capsys, flags, layouts, said
):
    assert emulated(*flags, layouts=layouts) == 1

    assert said in capsys.readouterr().err
    assert not (tmp_path / "out" / "experiment.json").exists()
