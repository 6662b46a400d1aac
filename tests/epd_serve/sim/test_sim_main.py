"""The program of a simulated stage: what it refuses, and what it imports."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from epd_serve.sim.main import main


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--profile", "/nowhere/p.json"], "/nowhere/p.json"),
        (["--wiring", "{"], "--wiring"),
        (["--max-num-seqs", "0"], "max_running"),
        (["--fault", "x=1"], "x is no fault"),
        (["--host", "256.0.0.1"], "cannot listen"),
        (["--guarded"], "VLLM_API_KEY"),
    ],
)
def test_a_wrong_flag_is_said_in_one_line(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert main([*argv, "--port", "0"]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert said in line


@pytest.mark.parametrize(("role", "waits"), [("E", 3.5), ("P", 0.0)])
def test_nobody_can_connect_before_the_start_of_its_role_is_over(
    role: str, waits: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile, path, waited = tmp_path / "profile.json", tmp_path / "stage", list[float]()

    def sleep(seconds: float) -> None:
        assert not path.exists()
        waited.append(seconds)

    profile.write_text('{"start_s": {"E": 3.5}}')
    monkeypatch.setattr(time, "sleep", sleep)
    assert main(["--role", role, "--uds", str(path), "--profile", str(profile), "--fault", "x=1"]) == 2
    assert waited == [waits] and path.exists()


def test_importing_it_brings_no_tensors() -> None:
    script = (
        "import sys; import epd_serve.sim.main; "
        "print([n for n in ('torch', 'vllm', 'numpy', 'fastapi', 'pydantic', 'epd_serve.engine') if n in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
