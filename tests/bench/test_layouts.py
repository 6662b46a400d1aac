"""`epd-bench layouts` as a command: what is kept whatever happens, and that the same command goes on."""

from __future__ import annotations

import contextlib
import json

import pytest

from bench import layouts as command
from bench.cli import main
from epd_serve.errors import StageError
from tests.bench.sweep.experiments import Scripted

TWO = ["--layouts", "TP1x2,(E-P)-D", "--rates", "1,2", "--engine", "sim"]


@pytest.fixture
def layouts(tmp_path, monkeypatch):
    """Runs the command with a backend that starts nothing; returns its exit code."""

    monkeypatch.setattr(command, "draw", lambda path: None)  # takes seconds, and has tests of its own

    def run(backend: Scripted, *flags: str) -> int:
        monkeypatch.setattr(command, "stages_of", lambda *_: contextlib.nullcontext(backend))
        return main(["layouts", *TWO, "--out", str(tmp_path / "out"), *flags])

    return run


def fails(error):
    def event():
        raise error

    return event


def whole(tmp_path):
    return json.loads((tmp_path / "out" / "result.json").read_text())


ALL = [("TP1x2", "1 rps"), ("TP1x2", "2 rps"), ("(E-P)-D", "1 rps"), ("(E-P)-D", "2 rps")]


def test_every_deployment_is_measured_at_every_rate_and_then_nothing_is(layouts, tmp_path):
    backend = Scripted()
    assert layouts(backend) == 0
    assert backend.measured == ALL

    found = whole(tmp_path)
    assert found["env"]["kind"] == "simulated"
    assert found["figures"]["(E-P)-D/2 rps/ok"] == 1.0
    assert (found["figures"]["TP1x2/devices"], found["figures"]["(E-P)-D/same_tokens"]) == (2, 1.0)
    assert [(row["deployment"], row["run"]) for row in found["rows"]] == ALL

    again = Scripted()
    assert layouts(again) == 0 and again.measured == []


def test_a_deployment_that_does_not_start_is_recorded_and_the_others_go_on(layouts, tmp_path, capsys):
    backend = Scripted({("TP1x2", "1 rps"): fails(StageError("EPD0 did not start: no memory", stage="EPD0"))})

    assert layouts(backend) == 1
    assert backend.measured == ALL[2:]
    assert whole(tmp_path)["env"]["failed"] == {"TP1x2": "EPD0 did not start: no memory"}
    assert "TP1x2, 1 rps: not measured. EPD0 did not start: no memory" in capsys.readouterr().err

    again = Scripted()
    assert layouts(again) == 0
    assert again.measured == ALL[:2], "what was measured is not measured again"
    assert whole(tmp_path)["env"]["failed"] == {}


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (SystemExit(143), 143)])
def test_an_interrupted_experiment_goes_on_where_it_was(layouts, tmp_path, capsys, error, code):
    assert layouts(Scripted({("(E-P)-D", "1 rps"): fails(error)})) == code
    assert "what was measured is kept" in capsys.readouterr().err
    assert len(whole(tmp_path)["rows"]) == 2

    again = Scripted()
    assert layouts(again) == 0
    assert again.measured == ALL[2:]
    rows = (tmp_path / "out" / "_E-P_-D" / "rows.jsonl").read_text().splitlines()
    assert [json.loads(line)["run"] for line in rows] == ["1 rps", "2 rps"], "what the cut run left is gone"


def test_a_process_that_was_killed_leaves_what_it_had_finished(layouts, tmp_path):
    class Killed(BaseException):
        """Nothing runs after it, as after SIGKILL."""

    with pytest.raises(Killed):
        layouts(Scripted({("TP1x2", "2 rps"): fails(Killed())}))
    assert not (tmp_path / "out" / "result.json").exists()

    again = Scripted()
    assert layouts(again) == 0 and again.measured == ALL[1:]


def test_another_experiment_is_refused(layouts, tmp_path, capsys):
    assert layouts(Scripted()) == 0
    backend = Scripted()
    assert layouts(backend, "--seed", "4") == 1
    assert "seed was 0, is 4" in capsys.readouterr().err and backend.measured == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--layouts", "TP1x2,(E-P"], "never closed\n"),
        (["--rates", "0"], "--rates 0: a number above 0"),
        (["--rates", "1,1"], "--rates names a rate twice"),
        (["--duration", "-3"], "--duration is -3: above 0"),
        (["--slo", "fast"], "--slo 'fast'"),
        (["--sim-profile", "/nowhere.json"], "/nowhere.json"),
        (["--serve-flags", "'"], "--serve-flags"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_there(tmp_path, capsys, flags, said):
    assert main(["layouts", *TWO, "--out", str(tmp_path / "out"), *flags]) == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_quick_run_has_plain_vllm_beside_it_unless_it_is_told_not_to(layouts, tmp_path):
    backend = Scripted()
    assert layouts(backend, "--quick", "--rates", "1", "--duration", "1") == 0
    assert backend.measured == [(name, "1 rps") for name in ("TP1x2", "(E-P)-D", "plain vLLM x2")]
    assert layouts(alone := Scripted(), "--quick", "--baselines", "none", "--out", str(tmp_path / "alone")) == 0
    assert {name for name, _ in alone.measured} == {"TP1x2", "(E-P)-D"}


def test_a_result_beside_the_folder_is_the_same(layouts, tmp_path):
    assert layouts(Scripted(), "--json", str(tmp_path / "r.json")) == 0
    beside = json.loads((tmp_path / "r.json").read_text())
    assert beside["figures"] == whole(tmp_path)["figures"]


def test_repeats_measure_all_of_it_with_the_next_seed_and_go_on_where_they_were(layouts, tmp_path, capsys):
    flags = ["--repeats", "2", "--seed", "5", "--json", str(tmp_path / "r.json")]
    assert layouts(Scripted({("TP1x2", "2 rps"): fails(KeyboardInterrupt())}), *flags) == 130
    assert not (tmp_path / "r.json").exists()

    again = Scripted()
    assert layouts(again, *flags) == 0
    assert again.measured == ALL[1:] + ALL
    found = json.loads((tmp_path / "r.json").read_text())
    assert found == whole(tmp_path)
    assert found["env"]["seeds"] == 2 and [row["seed"] for row in found["rows"]] == [5] * 4 + [6] * 4
    assert found["figures"]["(E-P)-D/2 rps/ok"] == 1.0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"seed-5", "seed-6", "result.json"}


def test_repeats_of_which_one_is_not_whole_end_with_1(layouts, capsys):
    once = iter([fails(StageError("no memory", stage="EPD0")), lambda: None])
    backend = Scripted({("TP1x2", "1 rps"): lambda: next(once)()})
    assert layouts(backend, "--repeats", "2") == 1
    assert "TP1x2, 1 rps: not measured. no memory" in capsys.readouterr().err
    assert layouts(Scripted(), "--repeats", "0") == 1
    assert "--repeats is 0: 1 or more" in capsys.readouterr().err


def test_repeats_do_not_go_into_the_folder_of_one_seed(layouts, tmp_path, capsys):
    assert layouts(Scripted()) == 0
    before = whole(tmp_path)
    assert layouts(backend := Scripted(), "--repeats", "2") == 1
    assert "holds an experiment of one seed" in capsys.readouterr().err
    assert backend.measured == [] and whole(tmp_path) == before
