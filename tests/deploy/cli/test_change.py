"""Commands on a running deployment: what they say when it is gone."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from deploy.cli import which
from deploy.cli.command import FAILED, main
from deploy.host.launches import ADMIN_SOCKET, RunningLaunch


def test_a_launch_that_ends_meanwhile_is_one_line_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(tmp_path / ADMIN_SOCKET))  # nobody listens there any more
    monkeypatch.setattr(which, "choose_launch", lambda *_, **__: RunningLaunch("f00d", tmp_path, tmp_path))

    assert main(["status"]) == FAILED
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and "f00d" in said.err
