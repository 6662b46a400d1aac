"""What of `make test-npu` needs no card: how answers are compared, what the report holds, how its runner keeps going.

The runner's parts here are functions of a module made for the test: one that passes, raises, hangs, leaves a process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.cli import parser
from epd_serve.phases.stamps import Stamp, Timeline
from tests.npu import run
from tests.npu.answers import (
    LEAST_NEAR_TIE,
    MOST_NEAR_TIE,
    Answer,
    Place,
    answer_of,
    difference,
    first_difference,
    is_near_tie,
    near_tie_of,
    noise,
)
from tests.npu.card import MODES, Card, read_card
from tests.npu.launches import stage_events
from tests.npu.parts import acceptance, benches, eight_b, shares
from tests.npu.parts.acceptance import textvqa_rows
from tests.npu.parts.exposed import feature_times_ms
from tests.npu.plan import BUDGET_S, PARTS, Part, chosen
from tests.npu.report import LOG_BYTES, Report, shown_environment
from tests.npu.rig import PartFailed, Rig
from tests.waiting import wait_for

ROOT = Path(__file__).resolve().parents[1]


def answer(*ids: int, runner_up: int = 99, lead: float = 2.0) -> Answer:
    """An answer that preferred each token to `runner_up` by `lead`."""
    return tuple(Place(one, -0.1, ((one, -0.1), (runner_up, -0.1 - lead))) for one in ids)


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


def test_an_unknown_kind_of_device_is_refused(monkeypatch):
    monkeypatch.setenv("EPD_TEST_DEVICE", "tpu")
    with pytest.raises(ValueError, match="one of npu, cuda, cpu"):
        read_card()


def test_every_row_of_a_layout_says_what_stands_for_its_devices(tmp_path, monkeypatch):
    monkeypatch.setenv("EPD_TEST_DEVICE", "cpu")
    monkeypatch.setenv("EPD_TEST_DEVICES", "1")
    rig = Rig("ep-d", read_card(), Report(tmp_path), tmp_path, tmp_path)
    with rig.layout("(E-P)-D"):
        rig.row("ready_s", 1.0)
        rig.check(True, "it serves")
        with rig.layout("(E-PD)"):
            rig.row("ready_s", 2.0)
    rig.row("ended", 1)

    told = [(row.get("layout"), row.get("devices")) for row in rig.report.read("rows.jsonl")]
    assert told == [("(E-P)-D", "2 virtual ones on 1")] * 2 + [("(E-PD)", "1"), (None, None)]


def test_what_happened_to_a_request_is_told_apart_by_who_stamped_it():
    """The proxy calls a request encoded when it may go on, E when it is, and D hears of features, too."""
    found = [("proxy", "arrived", "r", {"keys": ["k"]}), ("E0", "encoded", "k", {}), ("P0", "feature_event", "k", {})]
    found += [("D0", "feature_event", "k", {}), ("proxy", "encoded", "r", {}), ("proxy", "done", "r", {})]
    stamps = [Stamp(float(at), who, subject, event, more) for at, (who, event, subject, more) in enumerate(found)]
    told = stage_events(Timeline(stamps), "r")

    assert (told["E", "encoded"], told["proxy", "encoded"], told["P", "feature_event"]) == (1.0, 4.0, 2.0)


def test_the_rows_of_textvqa_find_their_images_and_answers_wherever_they_lie_below_the_folder(tmp_path):
    there = tmp_path / "textvqa"
    for path in ("train_images/a.jpg", "textvqa_json/textvqa_val.jsonl", "textvqa_json/textvqa_val_annotations.json"):
        (there / path).parent.mkdir(parents=True, exist_ok=True)
        (there / path).write_text("{}")
    asked = {"question": "What?", "question_id": 7, "image": "data/textvqa/train_images/a.jpg"}
    (there / "textvqa_json/textvqa_val.jsonl").write_text(json.dumps(asked) + "\n")

    rows = textvqa_rows(there, tmp_path / "made")
    assert json.loads(rows.read_text()) == {**asked, "image": str(there / "train_images/a.jpg")}
    assert (rows.parent / "textvqa_val_annotations.json").read_text() == "{}"
    (there / "train_images/a.jpg").unlink()
    with pytest.raises(PartFailed, match=r"has no a\.jpg"):
        textvqa_rows(there, tmp_path / "made")


def test_a_feature_is_exposed_until_the_device_has_it_and_not_until_the_host_has():
    found = [("E0", "encode_start", 1.0, {}), ("E0", "encoded", 2.0, {}), ("P0", "feature_pinned", 2.25, {})]
    found += [("P0", "prefill_arrived", 2.5, {}), ("P0", "feature_loaded", 5.0, {"t0": 4.0})]
    stamps = [Stamp(at, who, "r", event, more) for who, event, at, more in found]
    told = feature_times_ms(stage_events(Timeline(stamps), "r"))

    assert told == pytest.approx(
        {"encode_ms": 1e3, "copy_ms": 1e3, "transfer_ms": 1.25e3, "exposed_ms": 1e3, "encoded_to_device_ms": 3e3}
    )


def test_the_report_names_secrets_without_telling_them():
    told = shown_environment({"VLLM_API_KEY": "sk-1", "ASCEND_RT_VISIBLE_DEVICES": "0,1", "AWS_PROFILE": "mine"})

    assert told == {"ASCEND_RT_VISIBLE_DEVICES": "0,1", "VLLM_API_KEY": "(set)"}


def test_the_report_is_one_archive_of_rows_machine_and_logs_without_scratch(tmp_path):
    report = Report(tmp_path / "cuda-report")
    report.row(part="a", name="kv_overlap", value=[0.5], on="CPU")
    report.machine("cpu", model="m")
    log = tmp_path / "P0.log"
    log.write_bytes(b"the beginning" + b"x" * (LOG_BYTES + 1000) + b"the end")
    report.keep_logs("a", "(E-P)-D, core shares", log, tmp_path / "missing.log")
    (report.folder / "scratch").mkdir()
    (report.folder / "scratch" / "weights").write_bytes(b"0" * 100)

    with tarfile.open(report.pack(tmp_path / "cuda-report.tar.gz")) as tar:
        names = set(tar.getnames())
        machine = json.loads(tar.extractfile("cuda-report/machine.json").read())
        kept = tar.extractfile("cuda-report/parts/a/logs/(E-P)-D_core_shares/P0.log").read()
    assert "cuda-report/rows.jsonl" in names
    assert not [name for name in names if "scratch" in name]
    assert machine["model"] == "m"
    assert machine["packages"]["torch"]
    assert kept.startswith(b"the beginning") and kept.endswith(b"the end")
    assert len(kept) < LOG_BYTES + 100


def test_an_archive_that_would_be_too_large_goes_without_the_largest_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tests.npu.report.ARCHIVE_BYTES", 20_000)
    report = Report(tmp_path / "r")
    (report.folder / "large.bin").write_bytes(os.urandom(50_000))
    (report.folder / "small.bin").write_bytes(os.urandom(5_000))

    with tarfile.open(report.pack(tmp_path / "r.tar.gz")) as tar:
        assert tar.getnames() == ["r/small.bin"]
    assert "large.bin" in capsys.readouterr().out


def test_rows_of_a_run_that_was_killed_while_it_wrote_one_are_read_up_to_there(tmp_path):
    report = Report(tmp_path)
    report.row(part="a", name="x", value=1)
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"part": "a", "na')

    assert [row["value"] for row in report.read("rows.jsonl")] == [1]


def test_the_usual_parts_take_45_minutes_and_each_has_time_for_twice_its_estimate_or_nearly():
    usual = chosen("")

    assert sum(part.card_s for part in usual) <= BUDGET_S == 45 * 60
    assert all(part.limit_s >= 1.25 * part.card_s for part in PARTS)
    assert all(part.limit_s <= 580 for part in PARTS)
    assert [part.name for part in usual][:4] == ["acceptance", "ops", "plain", "plain-eager"]


def test_parts_that_are_named_bring_those_they_need_in_order():
    assert [part.name for part in chosen("ep-d,ops", MODES["0"])] == ["ops", "plain", "ep-d"]
    assert [part.name for part in chosen("ep-d,ops", MODES["0"], needed=False)] == [
        "ops",
        "ep-d",
    ]  # what `--again` repeats
    assert {"storm", "faults"} <= {part.name for part in chosen("all")} - {part.name for part in chosen("")}
    with pytest.raises(ValueError, match="no part 'opps': acceptance, ops, plain"):
        chosen("opps")


def test_parts_run_with_graphs_and_without_unless_one_is_asked_for():
    def named(names: str, eager: str) -> list[str]:
        return [part.name for part in chosen(names, MODES[eager])]

    assert named("ops,e-pd,8b", "") == ["ops", "plain", "plain-eager", "e-pd", "e-pd-eager", "8b"]
    assert named("ops,e-pd,8b", "0") == ["ops", "plain", "e-pd", "8b"]
    assert named("ops,e-pd,8b", "1") == ["ops", "plain-eager", "e-pd-eager", "8b-eager"]
    assert named("8b-eager", "0") == ["8b-eager"]


@pytest.mark.parametrize("kind", ["cpu", "npu"])
def test_epd_bench_takes_the_commands_that_parts_give_it(tmp_path, monkeypatch, kind):
    """On a card a flag that has another name by now would cost a part."""
    given = []

    def note(rig, command, limit_s):
        given.append(command[3:])
        return 1

    monkeypatch.setattr(Rig, "run", note)
    for name in ("8b", "npu"):
        (tmp_path / name).mkdir()  # their models, which are there
    card = Card(kind, (0,), ("card",), "", "", MODES["0"], 1.0, "", "")
    rig = Rig("some", card, Report(tmp_path), tmp_path, tmp_path)
    launch = SimpleNamespace(url="http://127.0.0.1:1")
    for part in (
        benches.transfer_pd,
        benches.interference,
        eight_b.plain,
        eight_b.shared,
        eight_b.long_prompts,
        lambda rig: acceptance._load(rig, launch, 8, str(tmp_path / "npu")),
        lambda rig: shares._operators(rig, (0.3, 0.7)),
    ):
        with contextlib.suppress(PartFailed):  # they miss the results
            part(rig)
    assert len(given) == 7
    for words in given:
        parser().parse_args(words)


def test_answers_come_back_from_a_file_as_they_were():
    assert answer_of(json.loads(json.dumps(answer(1, 2), default=vars))) == answer(1, 2)


def test_no_part_needs_what_only_running_tests_or_drawing_charts_takes():
    """The interpreter that serves on a card need not have it."""
    modules = {part.entry.partition(":")[0] for part in PARTS} | {"tests.npu.run", "tests.npu.part"}
    modules |= {
        "bench.layouts",
        "bench.micro.pd.command",
        "bench.micro.interference.command",
        "bench.clients.command",
    }  # what parts run
    absent = "pytest=None, hypothesis=None, matplotlib=None, scipy=None, jinja2=None, aiohttp=None"
    script = f"import sys; sys.modules.update({absent})\nimport {', '.join(sorted(modules))}"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stderr


def started(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`make test-npu` as make runs it."""
    return subprocess.run(
        ["bash", "tests/npu/run.sh", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_an_interpreter_without_vllm_is_refused_in_one_line_and_gets_nothing_installed(tmp_path):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "$@"\n')  # -S: sees no site-packages
    bare.chmod(0o755)

    done = started("--plan", EPD_TEST_DEVICE="cuda", PYTHON=str(bare))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "has no vLLM: set PYTHON= to the interpreter that has" in line


def test_the_interpreter_that_is_given_runs_the_plan_without_an_index():
    done = started("--plan", EPD_TEST_DEVICE="cuda", PYTHON=sys.executable, PIP_NO_INDEX="1", VENV="/no/such")
    assert done.returncode == 0, done.stderr
    assert "P-D: tokens and KV, shared memory" in done.stdout


# --- the runner -----------------------------------------------------------------------------------------------------

MODULE = """
import os, subprocess, sys, time
from pathlib import Path
from tests.npu.rig import Skipped

def passes(rig):
    rig.row("seen", 1)
    with (Path(os.environ["RAN"])).open("a") as file:
        file.write("passes ")

def raises(rig):
    rig.row("before", 1)
    raise RuntimeError("a broken kernel")

def two_checks(rig):
    rig.check(False, "the first", "it is not so")
    rig.check(True, "the second")
    rig.check(False, "the third", "neither is this")

def skips(rig):
    raise Skipped("there is no such thing here")

def says_its_mode(rig):
    rig.row("eager", rig.card.eager)

def hangs(rig):
    rig.row("before", 1)
    Path(os.environ["RAN"]).write_text("hangs")
    time.sleep(600)

def ignores_its_end(rig):
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)

def leaves_a_process(rig):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    Path(os.environ["RAN"]).write_text(str(child.pid))
"""


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """`parts(name, …)`: the runner's parts are these functions of MODULE."""
    (tmp_path / "made_parts.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    monkeypatch.setenv("EPD_TEST_DEVICE", "cpu")
    monkeypatch.setenv("RAN", str(tmp_path / "ran"))
    monkeypatch.setattr(run._Run, "machine", lambda self: None)

    def made(*names: str, limit_s: float = 60.0, cpu_s: float = 1.0) -> None:
        found = tuple(Part(name, name, f"made_parts:{name}", 1.0, cpu_s, limit_s) for name in names)
        monkeypatch.setattr(run, "chosen", lambda asked, *_, **__: found)

    yield made
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def outcomes(tmp_path: Path) -> dict[str, str]:
    found = Report(tmp_path / "build" / "cpu-report").outcomes()
    return {name: line.get("outcome", "interrupted") for name, line in found.items()}


def test_a_part_that_raises_stops_no_other_and_leaves_its_traceback(tmp_path, parts):
    parts("raises", "skips", "passes")

    assert run.main([], tmp_path / "build") == 1
    assert outcomes(tmp_path) == {"raises": "failed", "skips": "skipped", "passes": "passed"}
    folder = tmp_path / "build" / "cpu-report"
    assert "RuntimeError: a broken kernel" in (folder / "parts" / "raises" / "failure.txt").read_text()
    summary = (folder / "SUMMARY.txt").read_text()
    assert "there is no such thing here" in summary
    assert all(row["on"] == "CPU: a rehearsal, no card" for row in Report(folder).read("rows.jsonl"))
    assert tarfile.is_tarfile(tmp_path / "build" / "cpu-report.tar.gz")


def test_a_check_that_does_not_hold_lets_its_part_go_on_and_fails_it(tmp_path, parts):
    parts("two_checks")

    assert run.main([], tmp_path / "build") == 1
    report = Report(tmp_path / "build" / "cpu-report")
    assert [row["value"] for row in report.read("rows.jsonl")] == ["DOES NOT HOLD", "holds", "DOES NOT HOLD"]
    assert "neither is this" in report.outcomes()["two_checks"]["why"]


def test_a_part_that_hangs_is_ended_at_its_limit_and_says_where_it_was(tmp_path, parts):
    parts("hangs", "passes", limit_s=8.0)

    assert run.main([], tmp_path / "build") == 1
    assert outcomes(tmp_path) == {"hangs": "failed", "passes": "passed"}
    assert "time.sleep(600)" in (tmp_path / "build/cpu-report/parts/hangs/failure.txt").read_text()


def test_a_part_that_does_not_end_when_it_is_told_to_is_killed(tmp_path, parts, monkeypatch):
    monkeypatch.setattr(run, "ENDING_S", 1.0)
    parts("ignores_its_end", limit_s=8.0)

    assert run.main([], tmp_path / "build") == 1
    assert "did not end within 8 s" in Report(tmp_path / "build/cpu-report").outcomes()["ignores_its_end"]["why"]


def test_what_a_part_leaves_running_is_ended_and_named(tmp_path, parts):
    parts("leaves_a_process")

    assert run.main([], tmp_path / "build") == 0
    pid = int((tmp_path / "ran").read_text())
    assert not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()
    (swept,) = Report(tmp_path / "build/cpu-report").outcomes()["leaves_a_process"]["swept"]
    assert "time.sleep(600)" in swept


@pytest.mark.parametrize("eager", ["", "0", "1"])
def test_a_part_starts_its_stages_in_its_own_mode_whatever_is_asked_of_the_others(tmp_path, parts, monkeypatch, eager):
    monkeypatch.setenv("EAGER", eager)
    one = Part("says_its_mode", "", "made_parts:says_its_mode", 1.0, 1.0, 60.0)
    both = (*one.usual_in(MODES["0"]), *one.usual_in(MODES["1"]))
    monkeypatch.setattr(run, "chosen", lambda *_, **__: both)

    assert run.main([], tmp_path / "build") == 0
    rows = Report(tmp_path / "build" / "cpu-report").read("rows.jsonl")
    assert [(row["part"], row["value"]) for row in rows] == [("says_its_mode", False), ("says_its_mode-eager", True)]


def test_a_place_for_the_copy_that_cannot_be_written_is_said_before_anything_runs(tmp_path, parts, capsys):
    parts("passes")
    (tmp_path / "file").touch()

    assert run.main(["--out", str(tmp_path / "file" / "below")], tmp_path / "build") == 2
    assert "cannot be written" in capsys.readouterr().out
    assert not (tmp_path / "ran").exists()


def test_a_second_call_runs_only_what_is_not_finished_unless_it_is_asked_to(tmp_path, parts):
    parts("passes")
    for words in ([], [], ["--again"]):
        assert run.main(words, tmp_path / "build") == 0

    assert (tmp_path / "ran").read_text() == "passes passes "
    assert len(Report(tmp_path / "build/cpu-report").read("rows.jsonl")) == 1


def test_no_part_begins_that_would_take_longer_than_is_left(tmp_path, parts, capsys):
    parts("passes", cpu_s=100.0)

    assert run.main(["--budget-s", "50"], tmp_path / "build") == 3
    assert not (tmp_path / "ran").exists()
    assert "Left: passes" in capsys.readouterr().out


def test_a_part_that_the_budget_cuts_short_is_repeated_and_not_failed(tmp_path, parts):
    parts("hangs", limit_s=60.0)

    assert run.main(["--budget-s", "6"], tmp_path / "build") == 3
    assert outcomes(tmp_path) == {"hangs": "interrupted"}


RUNNER = """
import sys
from pathlib import Path
from tests.npu import run
from tests.npu.plan import Part

name, build = sys.argv[1:]
run.chosen = lambda asked, *_, **__: (Part(name, name, f"made_parts:{name}", 1.0, 1.0, 60.0),)
run._Run.machine = lambda self: None
sys.exit(run.main([], Path(build)))
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 130), (signal.SIGKILL, -9)])
def test_a_run_that_is_ended_or_killed_goes_on_with_the_part_that_was_interrupted(tmp_path, parts, number, code):
    build, copied = tmp_path / "build", Report(tmp_path / "out" / "cpu-report")
    where = {**os.environ, "OUT": str(tmp_path / "out")}
    process = subprocess.Popen([sys.executable, "-c", RUNNER, "hangs", str(build)], cwd=ROOT, env=where)
    wait_for(lambda: copied.read("rows.jsonl"))  # as it grows: nobody may have time to copy it afterwards
    process.send_signal(number)

    assert process.wait(30) == code
    assert outcomes(tmp_path) == {"hangs": "interrupted"}
    assert [row["name"] for row in copied.read("rows.jsonl")] == ["before"]
    (tmp_path / "made_parts.py").write_text(MODULE.replace("time.sleep(600)", "pass"))
    done = subprocess.run([sys.executable, "-c", RUNNER, "hangs", str(build)], cwd=ROOT, timeout=60)
    assert done.returncode == 0
    assert outcomes(tmp_path) == {"hangs": "passed"}


def test_without_a_card_the_run_says_so_in_one_line_and_writes_nothing(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("EPD_TEST_DEVICE", "npu")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("npu_ops.discovery._numbered_files", lambda *_: {})

    assert run.main([], tmp_path / "build") == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert "make test-npu EPD_TEST_DEVICE=cpu" in line
    assert not (tmp_path / "build").exists()


def test_the_plan_can_be_seen_without_a_card(monkeypatch, capsys):
    monkeypatch.setenv("EPD_TEST_DEVICE", "cuda")

    assert run.main(["--plan"]) == 0
    assert 40.0 < float(capsys.readouterr().out.split()[-1]) <= 45.0
