"""A client that is run as AISBench is: whatever it does, nothing of it is left."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from bench.aisbench import process
from epd_serve.errors import ConfigError
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


def test_one_that_ignores_ctrl_c_is_killed_with_its_children_and_its_shared_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "GRACE_S", 0.3)
    monkeypatch.setattr(process, "_end", _patiently(process._end, monkeypatch))

    def interrupt() -> None:
        wait_for(lambda: (tmp_path / "at").exists() and (tmp_path / "at").read_text().count(" "))
        os.kill(os.getpid(), signal.SIGINT)

    killer = threading.Thread(target=interrupt)
    killer.start()
    ended = process.run([sys.executable, "-c", STUBBORN], tmp_path, 600.0)
    killer.join()

    assert ended.signal == signal.SIGINT and ended.early and ended.code == -signal.SIGKILL
    pid, block = (tmp_path / "at").read_text().split()
    wait_for(lambda: not _alive(int(pid)))
    wait_for(lambda: not Path("/dev/shm", block).exists())


def _patiently(end, monkeypatch):  # type: ignore[no-untyped-def]
    """The killing itself takes the time that it takes on a busy machine."""

    def patient(child) -> None:  # type: ignore[no-untyped-def]
        monkeypatch.setattr(process, "GRACE_S", 60.0)
        end(child)

    return patient


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_one_that_ends_by_itself_leaves_its_code_and_its_words(tmp_path):
    ended = process.run([sys.executable, "-c", "print('hello'); raise SystemExit(3)"], tmp_path, 600.0)

    assert ended == process.Ended(3) and not ended.early
    assert (tmp_path / "ais_bench.log").read_text() == "hello\n"


def test_signals_mean_afterwards_what_they_meant_before(tmp_path):
    before = [signal.getsignal(number) for number in process.SIGNALS]
    process.run([sys.executable, "-c", ""], tmp_path, 600.0)

    assert [signal.getsignal(number) for number in process.SIGNALS] == before


def test_a_command_that_is_not_there_is_said(tmp_path):
    with pytest.raises(ConfigError, match="/none cannot be started"):
        process.run(["/none"], tmp_path, 1.0)


def test_no_proxy_stands_between_a_client_and_the_endpoint(monkeypatch):
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("NO_PROXY", "example.org")
    found = process.variables("10.0.0.7")

    assert found["no_proxy"] == found["NO_PROXY"] == "example.org,10.0.0.7"
    assert found["HF_HUB_OFFLINE"] == "1" and "PYTHONPATH" not in found


def test_progress_is_what_aisbench_says_of_itself(tmp_path):
    assert process.in_words(process.state(tmp_path)) == "starting"
    status = tmp_path / "results" / "20260101_000000" / "status_tmp"
    status.mkdir(parents=True)
    counts = {"POST": 12, "RECV": 10, "FINISH": 9, "FAIL": 1}
    entry = {"status": "inferencing", "total_count": 61, "other_kwargs": counts}
    (status / "tmp_x.json").write_text(json.dumps([{"status": "start"}, entry]))

    assert process.in_words(process.state(tmp_path)) == "inferencing, 12 sent, 9 of 61 done, 1 failed"
    (status / "tmp_x.json").write_text('[{"sta')
    assert process.state(tmp_path) == {}, "it is read while it is written"


def test_the_live_line_is_for_terminals_only(tmp_path):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal, pipe = Terminal(), io.StringIO()
    for out in (terminal, pipe):
        process.run([sys.executable, "-c", ""], tmp_path, 600.0, label="2 rps", progress=out)

    assert "2 rps  0 s  AISBench: starting" in terminal.getvalue() and terminal.getvalue().endswith("\r\x1b[K")
    assert pipe.getvalue() == ""
