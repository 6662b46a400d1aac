"""`epd-serve profile`: a simulated stage's times are measured, and found to be what its profile says."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deploy.cli.command import BAD_INPUT, main
from deploy.host.processes import group_members, running
from deploy.planner.calibrate import LEAST_STEPS
from deploy.planner.interference import InterferenceMap, InterferenceProfile, ProfiledOperator, Slowdown
from deploy.planner.profile import DeviceProfile, read_device_profile, write_device_profile
from epd_serve.sim.profile import Line, Profile
from epd_serve.trace import STEP, Trace
from tests.waiting import PATIENCE_S, wait_for

SIMULATED = {
    "encode": {"setup_s": 0.004, "per_unit_s": 0.0002},
    "prefill": {"setup_s": 0.003, "per_unit_s": 0.00005},
    "prefill_context_s": 2e-8,
    "decode_step_s": [[1, 0.004], [8, 0.01]],
    "capacity": {"max_running": 8, "step_tokens": 1024, "kv_tokens": 65536},
}


def test_a_profile_is_what_the_stages_take(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    simulated, out, operators = tmp_path / "sim.json", tmp_path / "profile.json", tmp_path / "operators.json"
    simulated.write_text(json.dumps(SIMULATED))
    two = [ProfiledOperator(name, name, 1.0, 1.0, "compute") for name in "EP"]
    pairs = (Slowdown("E", "P", 1.2, 1.2, 1.2, 1), Slowdown("P", "E", 1.6, 1.6, 1.6, 1))
    maps = (InterferenceMap(None, {}, pairs),)
    InterferenceProfile(version=1, device={"kind": "cpu"}, operators=tuple(two), maps=maps).save(operators)
    words = ["--engine", "sim", "--sim-profile", str(simulated), "--quick", "--parts", "alone", "--out", str(out)]
    assert main(["profile", *words, "--interference", str(operators), "--plot", str(tmp_path / "profile.svg")]) == 0
    found = read_device_profile(out)
    stage = found.stages[1]
    assert stage.encode.seconds(500) == pytest.approx(0.104, rel=0.1)
    assert stage.prefill.seconds(500) == pytest.approx(0.028, rel=0.1)
    assert stage.prefill_context_s == pytest.approx(2e-8, rel=0.2)
    assert stage.decode_s(1) == pytest.approx(0.004, rel=0.2) and stage.decode_s(8) == pytest.approx(0.01, rel=0.2)
    assert (stage.capacity.step_tokens, stage.capacity.max_running, stage.capacity.kv_tokens) == (1024, 8, 65536)
    assert 0 < found.front.seconds(100) < 0.2 and found.slowdown == {"encode+prefill": pytest.approx(1.4)}
    assert found.model == "epd-demo" and found.weight_bytes["PD"][1] > 0 and found.memory_bytes > 0
    assert {path.name for path in tmp_path.glob("profile*")} == {"profile.json", "profile.svg"}
    assert "part 1 of 1, alone on " in capfd.readouterr().err


@pytest.mark.slow
def test_a_profile_that_was_interrupted_leaves_no_process_and_goes_on(tmp_path: Path) -> None:
    simulated, out = tmp_path / "sim.json", tmp_path / "profile.json"
    simulated.write_text(json.dumps(SIMULATED))
    words = ["--engine", "sim", "--sim-profile", str(simulated), "--quick", "--out", str(out)]
    command = [sys.executable, "-m", "deploy.cli", "profile", *words, "--parts", "encode+prefill,prefill+decode"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        next(line for line in process.stderr if "part 2 of 2" in line)
        launched = wait_for(lambda: [one.pid for one in running() if one.parent == process.pid], "the second launch")
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130
    assert not [one for pid in launched for one in group_members(pid)] and not out.exists()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "1 of 2 parts are there already" in done.stderr and "part 1 of 2" not in done.stderr
    assert set(read_device_profile(out).slowdown) == {"encode+prefill", "prefill+decode"}


def test_a_profile_is_corrected_by_the_steps_of_a_trace(tmp_path: Path) -> None:
    out = tmp_path / "calibrated.json"
    stage = Profile(encode=Line(0.01), prefill=Line(0.01), decode_step_s=((1, 0.02),))
    write_device_profile(tmp_path / "profile.json", DeviceProfile("m", "d", {1: stage}))
    trace = Trace(str(tmp_path / "PD0.jsonl"), "PD0")
    work = {"prompt_tokens": 0, "item_tokens": 0, "decodes": 1, "item_pairs": 0, "context_tokens": 0, "kv_tokens": 100}
    for _ in range(LEAST_STEPS):
        trace.stamp("", STEP, t0=time.monotonic() - 0.03, **work)
    trace.close()
    words = ["--calibrate", str(tmp_path / "profile.json"), "--from", str(tmp_path), "--out", str(out)]
    assert main(["profile", *words]) == 0
    found = read_device_profile(out)
    assert found.how == "calibrated" and found.stages[1].prefill == stage.prefill
    assert found.stages[1].decode_s(1) == pytest.approx(0.03, rel=0.05)


def test_a_profile_is_corrected_by_a_recording_of_a_layout_that_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    profile, recording, out = tmp_path / "profile.json", tmp_path / "traffic.jsonl", tmp_path / "calibrated.json"
    stage = Profile(prefill=Line(0.01), decode_step_s=((1, 0.02),))
    write_device_profile(profile, DeviceProfile("m", "d", {1: stage}))
    row = '{"id":"%d","at_s":%d,"prompt_tokens":9,"output_tokens":11,"ttft_s":0.03,"e2e_s":0.13}\n'
    recording.write_text("".join(row % (number, number) for number in range(40)))
    words = ["profile", "--calibrate", str(profile), "--from", str(recording), "--out", str(out)]
    assert main(words) == BAD_INPUT
    assert (
        "is no folder of traces (epd-serve serve --trace-dir), and a recording needs --layout" in capfd.readouterr().err
    )
    assert main([*words, "--layout", "TP1"]) == 0
    (found,) = read_device_profile(out).stages.values()
    assert found.prefill.setup_s == pytest.approx(0.03, rel=0.02)
    assert found.decode_s(1) == pytest.approx(0.01, rel=0.02)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--calibrate a.json", "--calibrate FILE and --from PATH go together"),
        ("--devices 0", "--devices 0: this machine has"),
        ("--tp 0", "no list of sizes such as 1,2"),
        ("--parts nothing", "--parts has no nothing; there are alone"),
        ("--interference no/file", "interference profile no/file: "),
    ],
)
def test_bad_input_is_named(words: str, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--engine", "sim", *words.split()]) == BAD_INPUT
    assert said in capfd.readouterr().err
