"""A program that is tied to its parent ends with it, even when the parent is killed."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from bench.record import ROOT
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl(2)")

CHILD = """
import signal, sys
signal.signal(signal.SIGINT, lambda *_: (print("told", flush=True), sys.exit()))
print("up", flush=True)
signal.pause()
"""
PARENT = f"""
import signal, subprocess, sys
from deploy.host.parent_death_exec import parent_death_exec
argv = parent_death_exec([sys.executable, "-c", {CHILD!r}], signal.SIGINT)
subprocess.Popen([sys.executable, "-m", *argv], start_new_session=True)
signal.pause()
"""


def test_what_a_killed_process_started_gets_the_signal():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent, parent.stdout as said:
        assert said.readline() == "up\n"
        parent.kill()
        assert parent.wait(PATIENCE_S) == -signal.SIGKILL
        assert said.read() == "told\n"  # and it has closed its end
