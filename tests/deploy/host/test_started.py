"""Commands that a measurement starts: waited for, and ended with all that they left behind."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from deploy.host.processes import group_members
from deploy.host.started import end, started
from epd_serve.errors import StageError


def test_a_command_is_waited_for_until_it_is_ready_and_ended_with_the_context(tmp_path):
    said = tmp_path / "out"
    code = "import time; print('here', flush=True); time.sleep(60)"

    with started([sys.executable, "-c", code], tmp_path / "log", out=said) as running:
        assert running.ready(said.read_text, 30.0) == "here\n"
        assert running.process.poll() is None
    assert running.process.poll() is not None


def test_a_command_that_ends_or_never_gets_ready_is_an_error_with_its_log(tmp_path):
    with (
        pytest.raises(StageError, match="it ended with 3") as died,
        started(["sh", "-c", "echo why >&2; exit 3"], tmp_path / "a") as one,
    ):
        one.ready(lambda: None, 30.0)
    assert "why" in str(died.value)
    with pytest.raises(StageError, match="not ready after 0 s"), started(["sleep", "60"], tmp_path / "b") as one:
        one.ready(lambda: None, 0.01)


def test_a_command_that_ignores_its_signal_is_killed_with_its_children(tmp_path):
    stubborn = "trap '' INT; sleep 60 & echo here; wait; wait"
    begun = time.monotonic()
    with started(["sh", "-c", stubborn], tmp_path / "log", stop_s=0.2) as running:
        running.ready((tmp_path / "log").read_text, 30.0)
    assert not group_members(running.process.pid)
    assert time.monotonic() - begun < 30


def test_what_cleans_up_after_a_server_may_finish(tmp_path):
    cleaned = tmp_path / "cleaned"
    tracker = f"import sys, time, pathlib; sys.stdin.read(); time.sleep(0.5); pathlib.Path({str(cleaned)!r}).touch()"
    server = (
        "import subprocess, sys, time;"
        f"subprocess.Popen([sys.executable, '-c', {tracker!r}], stdin=subprocess.PIPE);"
        "print(flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", server], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    with process.stdout as ready:
        ready.readline()

    end(process)

    assert cleaned.exists()
    assert not group_members(process.pid)
