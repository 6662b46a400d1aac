"""No stage outlives its launcher, and our plugin leaves other people's vLLM alone. Linux."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from epd_serve.engine.argv import STAGE_ENV
from tests.waiting import PATIENCE_S, wait_for

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl(2)")

CHILD = """
import os, sys, time
from epd_serve.lifeline import die_with_parent
die_with_parent(int(sys.argv[1]))
print(os.getpid(), flush=True)
time.sleep(60)
"""
PARENT = f"""
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {CHILD!r}, str(os.getpid())])
time.sleep(60)
"""
PLUGIN = f"""
import os, logging, sys, types
sys.modules["torch"] = types.ModuleType("torch")  # takes seconds to import, and nothing here is asked of it
worker = type("WorkerWrapperBase", (), {{"init_device": lambda self: None}})
sys.modules["vllm.v1.worker.worker_base"] = types.SimpleNamespace(WorkerWrapperBase=worker)
theirs = worker.init_device
pythons_s = sys.getswitchinterval()
from epd_serve.engine import plugin
calls = []
plugin.die_with_parent = lambda pid: calls.append(pid)
plugin.multiprocessing.parent_process = lambda: type("P", (), {{"pid": 42}})
plugin.register(); plugin.register()
assert calls == [], calls
assert logging.getLogger("epd_serve").propagate and worker.init_device is theirs
assert sys.getswitchinterval() == pythons_s
os.environ[{STAGE_ENV!r}] = "P0"
plugin.register()
ours = worker.init_device
plugin.register()
assert calls == [42, 42] and worker.init_device is ours is not theirs, calls
assert sys.getswitchinterval() < pythons_s / 5, "threads of ours would wait for the model's"
plugin.multiprocessing.parent_process = lambda: None
plugin.register()
assert calls == [42, 42], calls
"""


def alive(pid: int) -> bool:
    """False for what is gone and for a zombie that nobody reaped yet."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_child_dies_when_its_parent_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=_environment())
    try:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert alive(child)
        parent.kill()
        wait_for(lambda: not alive(child))
    finally:
        parent.kill()
        parent.wait(PATIENCE_S)
        parent.stdout.close()


def test_a_child_whose_parent_has_already_gone_ends_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", CHILD, "1"], timeout=PATIENCE_S, env=_environment(), check=False)
    assert done.returncode == -signal.SIGKILL


def test_the_plugin_is_inert_outside_of_a_stage_and_idempotent_within() -> None:
    environment = _environment()
    environment.pop(STAGE_ENV, None)
    subprocess.run([sys.executable, "-c", PLUGIN], timeout=PATIENCE_S, env=environment, check=True)


def _environment() -> dict[str, str]:
    """The child finds our packages where this process did."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
