"""A client that is run as AISBench is: whatever it does, nothing of it is left."""

from __future__ import annotations

import sys
from pathlib import Path

from bench.aisbench.environment import run_command, variables
from tests.waiting import wait_for

STUBBORN = """
import signal, subprocess, sys, time
from multiprocessing import shared_memory
signal.signal(signal.SIGINT, signal.SIG_IGN)
block = shared_memory.SharedMemory(create=True, size=64)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open("at", "w").write(f"{child.pid} {block.name}")
time.sleep(600)
"""


def test_one_that_takes_too_long_and_ignores_ctrl_c_is_killed_with_its_children_and_its_shared_memory(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("bench.aisbench.environment.GRACE_S", 0.3)

    assert run_command([sys.executable, "-c", STUBBORN], tmp_path, 5.0) is None
    pid, block = (tmp_path / "at").read_text().split()
    wait_for(lambda: not _alive(int(pid)))
    wait_for(lambda: not Path("/dev/shm", block).exists())


def test_one_that_takes_too_long_may_write_what_it_has(tmp_path):
    code = "import time\ntry:\n    time.sleep(600)\nexcept KeyboardInterrupt:\n    open('kept', 'w').close()"

    assert run_command([sys.executable, "-c", code], tmp_path, 2.0) is None
    assert (tmp_path / "kept").exists()


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_one_that_ends_by_itself_leaves_its_code_and_its_words(tmp_path):
    assert run_command([sys.executable, "-c", "print('hello'); raise SystemExit(3)"], tmp_path, 600.0) == 3
    assert (tmp_path / "ais_bench.log").read_text() == "hello\n"


def test_a_command_that_is_not_there_is_in_its_log(tmp_path):
    assert run_command(["/none"], tmp_path, 60.0) == 127
    assert "/none" in (tmp_path / "ais_bench.log").read_text()


def test_no_proxy_stands_between_a_client_and_the_endpoint(monkeypatch):
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("NO_PROXY", "example.org")
    found = variables("10.0.0.7")

    assert found["no_proxy"] == found["NO_PROXY"] == "example.org,10.0.0.7"
    assert found["HF_HUB_OFFLINE"] == "1" and "PYTHONPATH" not in found
