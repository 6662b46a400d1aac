"""What threads a worker has where it computes, and how those wait that begin with its device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from epd_serve.cpu_threads import CpuThreads
from epd_serve.engine.worker_threads import leave_cores_to_workers

LATE_NS = 50_000_000  # many of gloo's own 10 ms
WORKER = """
import json, os, sys, threading, types
from pathlib import Path
import torch

def slack_ns():
    found = []
    def read():
        found.append(int(Path(f"/proc/{threading.get_native_id()}/timerslack_ns").read_text()))
    reader = threading.Thread(target=read)
    reader.start()
    reader.join()
    return found[0]

class WorkerWrapperBase:
    rpc_rank = 0
    def init_device(self):
        torch.set_num_threads = None  # as vLLM's CPU worker
        self.slack_ns = slack_ns()

module = types.ModuleType("vllm.v1.worker.worker_base")
module.WorkerWrapperBase = WorkerWrapperBase
sys.modules[module.__name__] = module
from epd_serve.engine.worker_threads import rule_threads
rule_threads()
before = slack_ns()
worker = WorkerWrapperBase()
worker.init_device()
torch.empty(1 << 20).fill_(1.0)
cores = sorted(os.sched_getaffinity(0))
print(json.dumps([torch.get_num_threads(), cores, before, worker.slack_ns, slack_ns()]))
"""


@dataclass(frozen=True)
class Found:
    """`before_ns`, `during_ns`, `after_ns`: how late the waits may end of threads that begin when the device does."""

    count: int
    cores: list[int]
    before_ns: int
    during_ns: int
    after_ns: int


def worker(**environment: str) -> Found:
    path = {"PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(
        [sys.executable, "-c", WORKER], env={**os.environ, **path, **environment}, capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr.decode()
    return Found(*json.loads(done.stdout))


def test_a_worker_has_its_threads_on_its_cores_and_no_others() -> None:
    core = max(os.sched_getaffinity(0))
    found = worker(EPD_SERVE_CPU_THREADS=CpuThreads((core,), 1).to_json())
    assert (found.count, found.cores) == (1, [core])


def test_a_worker_leaves_alone_what_the_operator_has_set() -> None:
    order = CpuThreads((max(os.sched_getaffinity(0)),), 1).to_json()
    assert worker(EPD_SERVE_CPU_THREADS=order, OMP_NUM_THREADS="3").cores == sorted(os.sched_getaffinity(0))


@pytest.mark.parametrize("apart", [True, False])
def test_a_server_keeps_off_the_workers_cores_where_it_is_told_to_and_has_others(
    monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    usable = {0, 1, 2, 3}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(usable))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: (usable.clear(), usable.update(cores)))
    monkeypatch.setenv("EPD_SERVE_CPU_THREADS", CpuThreads((2, 3), 2, decodes_only=apart).to_json())
    leave_cores_to_workers()
    assert usable == ({0, 1} if apart else {0, 1, 2, 3})
    monkeypatch.setenv("EPD_SERVE_CPU_THREADS", CpuThreads((0, 1, 2, 3), 4, decodes_only=apart).to_json())
    leave_cores_to_workers()
    assert usable == ({0, 1} if apart else {0, 1, 2, 3}), "there are no others"


def test_threads_that_begin_with_the_device_and_only_those_may_oversleep() -> None:
    found = worker(EPD_SERVE_CPU_THREADS=CpuThreads((0,), 1).to_json())
    assert found.during_ns >= LATE_NS > found.before_ns == found.after_ns


def test_a_worker_elsewhere_is_left_alone() -> None:
    found = worker()
    assert found.cores == sorted(os.sched_getaffinity(0)) and found.during_ns == found.before_ns
