"""Whether NVIDIA's MPS runs. Its control program is a stand-in here; what it prints without a daemon, "Cannot find MPS
control daemon process", is what users of the real one report."""

from __future__ import annotations

from pathlib import Path

import pytest

from npu_ops import mps


def tool(folder: Path, script: str) -> dict[str, str]:
    program = folder / "nvidia-cuda-mps-control"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin", mps.PIPE_DIRECTORY_ENV: str(folder / "pipe")}


def test_a_daemon_that_answers_runs(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    assert mps.why_no_mps(tool(tmp_path, f"cat > {asked}; echo 100.0")) == ""
    assert asked.read_text() == "get_default_active_thread_percentage\n"


@pytest.mark.parametrize(
    "script",
    ["echo 'Cannot find MPS control daemon process' >&2; exit 1", "echo 'Cannot find MPS control daemon process'"],
)
def test_without_a_daemon_the_reason_names_where_it_was_looked_for(tmp_path: Path, script: str) -> None:
    why = mps.why_no_mps(tool(tmp_path, script))
    assert why == f"no MPS control daemon at {tmp_path}/pipe (Cannot find MPS control daemon process)"


def test_a_program_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mps, "_TIMEOUT_S", 0.1)
    assert "did not answer within 0.1 s" in mps.why_no_mps(tool(tmp_path, "exec sleep 60"))


def test_in_a_container_without_the_program_the_daemons_files_tell(tmp_path: Path) -> None:
    environment = {"PATH": str(tmp_path), mps.PIPE_DIRECTORY_ENV: str(tmp_path)}
    assert "is not installed" in mps.why_no_mps(environment)
    (tmp_path / "control").touch()
    assert "is not installed" in mps.why_no_mps(environment)  # the socket outlives the daemon, its pid file does not
    (tmp_path / "nvidia-cuda-mps-control.pid").write_text("7")
    assert mps.why_no_mps(environment) == ""


@pytest.mark.parametrize(("share", "text"), [(0.3, "30"), (1.0, "100"), (0.125, "12.5"), (2 / 3, "66.6667")])
def test_a_share_as_a_percentage(share: float, text: str) -> None:
    assert mps.percentage(share) == text
