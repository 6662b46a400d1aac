"""What a measurement started ends with it, even when it is killed."""

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
from bench.tethered import tethered
subprocess.Popen(tethered([sys.executable, "-c", {CHILD!r}], signal.SIGINT), start_new_session=True)
signal.pause()
"""


def test_what_a_killed_measurement_started_is_told_to_end():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent, parent.stdout as said:
        assert said.readline() == "up\n"
        parent.kill()
        assert parent.wait(PATIENCE_S) == -signal.SIGKILL
        assert said.read() == "told\n"  # and it has closed its end
