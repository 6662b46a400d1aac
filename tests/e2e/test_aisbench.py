"""AISBench, in an environment of its own, against real stages."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from bench.aisbench.environment import default_folder, environment, found, outside
from bench.cli import main
from bench.record import ROOT
from epd_serve.demo.presets import builtin_model_dir
from tests.e2e.serving import Serving

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def aisbench() -> Path:
    """Its environment: made once per machine, a few minutes; skipped where no package index has what is pinned."""
    folder = default_folder()
    if found(folder) is None:
        script, env = ROOT / "deploy/install/environment.sh", {**outside(), "VENV": str(folder)}
        made = subprocess.run([script, "aisbench"], capture_output=True, text=True, env=env, timeout=3600, check=False)
        if made.returncode and "package index" in made.stdout + made.stderr:
            pytest.skip("no package index has what is pinned")
    return environment(folder).folder


@pytest.mark.promise("aisbench")
@pytest.mark.parametrize("launch", ["(E-P)-D"], indirect=True)
def test_aisbench_loads_real_stages_and_its_recording_is_judged(
    launch: Serving, aisbench: Path, tmp_path: Path
) -> None:
    argv = ["aisbench", launch.url, "--workload", "sharegpt4o-like", "--n", "8", "--rates", "4", "--slo", "60000:60000"]
    argv += ["--venv", str(aisbench), "--tokenizer", str(builtin_model_dir()), "--output-tokens", "8"]
    argv += [
        "--late-ms",
        "1e9",
        "--min-samples",
        "3",
        "--out",
        str(tmp_path / "out"),
        "--json",
        str(tmp_path / "r.json"),
    ]
    assert main(argv) == 0
    assert len((tmp_path / "r.rows.jsonl").read_text().splitlines()) == 8
    figures = json.loads((tmp_path / "r.json").read_text())["figures"]
    assert figures["4 rps/slo_60000:60000:p90/attainment"] == 1.0
    assert figures["goodput/slo_60000:60000:p90/rps"] == 4
    assert figures["4 rps/aisbench/TTFT/Average"] > 0
    encoded = launch.settled_counters("E0").get("encoded", 0)
    assert encoded > 0, "images went through E"
