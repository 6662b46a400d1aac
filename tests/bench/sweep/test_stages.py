"""The whole flow over simulated stages: started, loaded, taken down, and gone on with after the worst."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from bench.cli import main
from bench.record import ROOT
from bench.served import ROOT as SCRATCH
from bench.served import served
from bench.sweep import stages
from deploy.host.processes import group_members
from tests.waiting import PATIENCE_S, wait_for

pytestmark = pytest.mark.slow


def flags(out: Path, *more: str) -> list[str]:
    common = ["layouts", "--engine", "sim", "--workload", "pope-like", "--out", str(out)]
    return [*common, "--late-ms", "1e9", "--min-samples", "1", *more]


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_layouts_plain_servers_and_an_example_proxy_are_measured_alike(tmp_path):
    out = tmp_path / "out"

    asked = ["--layouts", "TP1x2,(E-PD)", "--rates", "20,40", "--n", "6", "--rates-per-device"]
    assert main(flags(out, *asked, "--baselines", "vllm")) == 0

    assert (out / "report.html").stat().st_size > 0
    figures = read(out / "result.json")["figures"]
    labels = {"TP1x2": (40, 80), "(E-PD)": (20, 40), "plain vLLM": (20, 40), "plain vLLM x2": (40, 80)}
    for name, rates in labels.items():
        assert figures[f"{name}/same_tokens"] == 1.0
        assert all(figures[f"{name}/{rate} rps/ok"] > 0 for rate in rates)
    traced = (out / "_E-PD_" / "phases.jsonl").read_text().splitlines()
    assert traced and all("exposed_ms" in json.loads(line) for line in traced)


def test_a_stage_that_dies_under_load_costs_its_rate_and_the_next_call_measures_it(tmp_path, monkeypatch):
    out, killed = tmp_path / "out", threading.Event()

    @contextlib.contextmanager
    def killing(*given, **more):
        with served(*given, **more) as launch:
            lines = (launch.run / "groups.jsonl").read_text().splitlines()
            stage = next(one["pid"] for one in map(json.loads, lines) if one["instance"] == "PD0")

            def kill() -> None:
                rows = out / "E-PD" / "rows.jsonl"
                wait_for(lambda: rows.exists() and '"2 rps"' in rows.read_text())
                os.killpg(stage, signal.SIGKILL)
                killed.set()

            thread = threading.Thread(target=kill, daemon=True)
            thread.start()
            yield launch
            thread.join(PATIENCE_S)

    asked = flags(out, "--layouts", "E-PD,TP1", "--rates", "20,2", "--n", "8")
    monkeypatch.setattr(stages, "served", lambda spec, *a, **k: (killing if spec == "E-PD" else served)(spec, *a, **k))
    assert main(asked) == 1
    assert killed.is_set()
    assert "PD0" in read(out / "result.json")["env"]["failed"]["E-PD"]
    assert [row["run"] for row in read(out / "E-PD" / "result.json")["rows"]] == ["20 rps"]
    assert len(read(out / "TP1" / "result.json")["rows"]) == 2, "the other deployment went on"

    monkeypatch.setattr(stages, "served", served)
    assert main(asked) == 0
    assert [row["run"] for row in read(out / "E-PD" / "result.json")["rows"]] == ["20 rps", "2 rps"]


def test_a_measurement_that_is_killed_leaves_nothing_running_and_goes_on(tmp_path):
    out = tmp_path / "out"
    asked = flags(out, "--layouts", "TP1", "--rates", "20,2", "--n", "8")
    bench = subprocess.Popen([sys.executable, "-m", "bench.cli", *asked], cwd=ROOT, stdout=subprocess.DEVNULL)
    rows = out / "TP1" / "rows.jsonl"
    wait_for(lambda: rows.exists() and '"2 rps"' in rows.read_text())
    (launcher,) = children(bench.pid)
    bench.kill()
    bench.wait(PATIENCE_S)
    wait_for(lambda: not group_members(launcher))
    for left in SCRATCH.glob(f"epd-bench-{bench.pid}-*"):  # which a later measurement would remove
        shutil.rmtree(left)
    assert len(read(out / "TP1" / "result.json")["rows"]) == 1

    assert main(asked) == 0
    assert [row["run"] for row in read(out / "result.json")["rows"]] == ["20 rps", "2 rps"]
    assert len(rows.read_text().splitlines()) == 16, "what the killed run left is gone"


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
