"""`epd-serve logs` and `epd-serve down` on a launch of this machine."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from deploy.cli.command import BAD_INPUT, main
from deploy.host.logs import PIECE_BYTES, read_log
from tests.deploy.launch.test_sim_launch import launched
from tests.waiting import wait_for


def test_a_launch_shows_its_logs_and_ends_by_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = ["--run-root", str(tmp_path)]
    with launched(tmp_path, "E-PD") as (client, launcher):
        (run,) = tmp_path.glob("*/launcher.json")
        (run.parent / "PD0.log").write_text("first\nlast\n")
        assert main(["logs", "PD0", *root]) == 0
        assert capsys.readouterr().out == "first\nlast\n"
        assert main(["logs", *root]) == 0
        assert "[PD0] first\n[PD0] last\n" in capsys.readouterr().out
        (run.parent / "front.0.log").write_text("a front door\n")
        assert main(["logs", "front.0", *root]) == 0
        assert capsys.readouterr().out == "a front door\n"
        assert main(["logs", "P7", *root]) == BAD_INPUT
        assert "E0, PD0, front.0" in capsys.readouterr().err

        assert main(["down", "--now", *root]) == 0
        assert wait_for(lambda: launcher.poll() is not None, "its end")
        assert launcher.returncode == 0
        with pytest.raises(httpx.TransportError):
            client.get("/ready")
        assert not run.exists()


@pytest.mark.parametrize("command", ["logs", "down"])
def test_where_nothing_runs_that_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert main([command, "--run-root", str(tmp_path)]) == BAD_INPUT
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["--name", "a"], "--name"),
        (["--ray-address", "a:1"], "--ray-address"),
        (["--ray", "--launch", "f"], "--launch"),
    ],
)
def test_flags_of_the_other_kind_of_deployment_are_refused(
    capsys: pytest.CaptureFixture[str], words: list[str], flag: str
) -> None:
    assert main(["status", *words]) == BAD_INPUT
    assert flag in capsys.readouterr().err


def test_a_log_is_read_piece_by_piece_from_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "E0.log"
    assert read_log(path, 7) == (b"", 0)
    path.write_bytes(b"a" * PIECE_BYTES + b"bc")
    first, offset = read_log(path, 0)
    assert (first, offset) == (b"a" * PIECE_BYTES, PIECE_BYTES)
    assert read_log(path, offset) == (b"bc", PIECE_BYTES + 2)
    assert read_log(path, -1) == (b"c", PIECE_BYTES + 2)
    path.write_bytes(b"new")
    assert read_log(path, offset) == (b"new", 3)
