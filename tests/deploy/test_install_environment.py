"""What `make serve` says before it installs: each refusal is one line with a fix, and leaves nothing behind."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "deploy/install/environment.sh"
ON_PINNED_PLATFORM = sys.version_info[:2] == (3, 11) and platform.machine() == "x86_64"
needs_pinned_platform = pytest.mark.skipif(not ON_PINNED_PLATFORM, reason="the CPU pins are for Python 3.11 on x86-64")


def refusal(goal: str = "serve", **environment: str) -> str:
    """The only line that the script writes to standard error when it refuses."""
    inherited = {key: value for key, value in os.environ.items() if key not in ("PYTHON", "DEVICE", "VENV", "PIP_ARGS")}
    done = subprocess.run(
        ["bash", str(SCRIPT), goal],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1, done.stderr
    (line,) = done.stderr.splitlines()
    return line


def test_an_unknown_device_is_refused():
    assert "DEVICE=gpu is unknown: one of auto, cpu, npu, cuda" in refusal(DEVICE="gpu")


def test_an_unknown_goal_is_refused():
    assert "serve, test or vllm023" in refusal("play", DEVICE="cpu", PYTHON=sys.executable)


def test_a_python_that_does_not_run_is_refused():
    assert "PYTHON=/no/such/python does not run" in refusal(DEVICE="cpu", PYTHON="/no/such/python")


def test_a_device_without_an_installed_vllm_is_refused(tmp_path):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "$@"\n')  # -S: sees no site-packages
    bare.chmod(0o755)

    line = refusal(DEVICE="npu", PYTHON=str(bare), VENV=str(tmp_path / "venv"))
    assert "uses the vLLM that is installed" in line
    assert "PYTHON=" in line


@needs_pinned_platform
def test_too_little_disk_is_refused_before_anything_is_written(tmp_path):
    (tmp_path / "df").write_text("#!/bin/sh\necho header\necho /dev/disk 9999 8765 1234 88% /\n")
    (tmp_path / "df").chmod(0o755)
    venv = tmp_path / "venv"

    line = refusal(
        DEVICE="cpu", PYTHON=sys.executable, VENV=str(venv), PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    )
    assert "needs 4000 MB" in line
    assert "there are 1234 MB" in line
    assert not venv.exists()


@needs_pinned_platform
def test_the_older_vllm_wants_more_disk_and_the_cpu_whatever_the_device(tmp_path):
    (tmp_path / "df").write_text("#!/bin/sh\necho header\necho /dev/disk 9999 8765 4321 88% /\n")
    (tmp_path / "df").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"

    line = refusal("vllm023", DEVICE="npu", PYTHON=sys.executable, VENV=str(tmp_path / "venv"), PATH=path)
    assert "needs 7000 MB" in line


@needs_pinned_platform
def test_an_environment_that_is_not_ours_is_left_alone(tmp_path):
    (tmp_path / "precious").write_text("mine")

    assert "exists and is not ours" in refusal(DEVICE="cpu", PYTHON=sys.executable, VENV=str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


# --- AISBench: made by a Python that only seems to make environments and to install


def made(folder: Path, *, pip: str = ":") -> subprocess.CompletedProcess[str]:
    """`pip`: what the shell does where pip would install."""
    log, install = f'echo "$2" >> {folder}.calls', "cp $0 $(dirname $0)/ais_bench"
    inside = f'#!/bin/sh\n{log}\n[ "$2" = pip ] || exit 0\n{pip} || exit 1\n{install}\n'
    python = folder.with_name("python3.11")
    python.write_text(f"#!/bin/sh\nmkdir $3/bin\ncat > $3/bin/python <<'X'\n{inside}X\nchmod +x $3/bin/python\n")
    python.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(python), "VENV": str(folder), "PIP_ARGS": ""}
    return subprocess.run(
        ["bash", str(SCRIPT), "aisbench"], env=environment, capture_output=True, text=True, timeout=120
    )


def test_aisbench_is_installed_once_and_looked_at(tmp_path):
    folder = tmp_path / "venv"

    assert made(folder).returncode == made(folder).returncode == 0
    calls = (tmp_path / "venv.calls").read_text()
    assert calls.splitlines() == ["pip", "import pyarrow, datasets, transformers, ais_bench.benchmark"]
    (folder / ".epd-bench-aisbench").write_text("unfinished")
    assert made(folder).returncode == 0 and len((tmp_path / "venv.calls").read_text().splitlines()) == 4


def test_aisbench_that_pip_cannot_install_is_tried_again_the_next_time(tmp_path):
    folder = tmp_path / "venv"

    failed = made(folder, pip="false")
    assert failed.returncode == 1 and "package index" in failed.stderr
    assert (folder / ".epd-bench-aisbench").read_text() == "unfinished\n"
    assert made(folder).returncode == 0


def test_aisbench_goes_into_no_folder_of_somebody_elses(tmp_path):
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "thesis.tex").write_text("years of work")

    refused = made(tmp_path / "venv")
    assert refused.returncode == 1 and "is not ours" in refused.stderr
    assert [path.name for path in (tmp_path / "venv").iterdir()] == ["thesis.tex"]


def test_aisbench_wants_room_before_anything_is_downloaded(tmp_path, monkeypatch):
    (tmp_path / "df").write_text("#!/bin/sh\necho header\necho /dev/disk 9999 8765 1234 88% /\n")
    (tmp_path / "df").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    refused = made(tmp_path / "venv")
    assert refused.returncode == 1 and "needs 4000 MB" in refused.stderr and "1234 MB" in refused.stderr
    assert not (tmp_path / "venv").exists()
