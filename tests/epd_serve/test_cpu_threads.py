"""How many threads a stage on CPU gets, and that its worker has them where it computes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.environment import stage_environment
from epd_serve.cpu_threads import BIND_ENV, COUNT_ENV, THREAD_FLOP, WAIT_ENV, CpuThreads, cpu_threads
from epd_serve.demo.presets import builtin_model_dir
from epd_serve.roles import Role
from epd_serve.stage_work import OUTPUT_TOKENS, StageWork, read_stage_work

CORES = tuple(range(8))


def work(*, encode: float = 1e15, prefill: float = 1e15, token: float = 1e15) -> StageWork:
    return StageWork(encode=encode, prefill=prefill, decode=token * OUTPUT_TOKENS)


@pytest.mark.parametrize(("threads_worth", "count"), [(0.01, 1), (1, 1), (3, 3), (8, 8), (1000, 8)])
def test_a_thread_for_so_much_work_and_none_without_a_core(threads_worth: float, count: int) -> None:
    made = cpu_threads(work(token=threads_worth * THREAD_FLOP), Role.D, CORES, 1)
    assert made == CpuThreads(CORES, count)


@pytest.mark.parametrize("role", Role)
def test_the_smallest_step_of_a_role_decides(role: Role) -> None:
    small = {"encode": 2 * THREAD_FLOP, "prefill": 3 * THREAD_FLOP, "token": 4 * THREAD_FLOP}
    assert cpu_threads(work(**small), role, CORES, 1).count == (4 if role.decodes else 3 if role.prefills else 2)


def test_a_model_of_which_too_little_is_known_gets_all_cores() -> None:
    assert cpu_threads(None, Role.EPD, CORES, 1).count == 8
    assert cpu_threads(None, Role.EPD, CORES, 2).count == 4


def test_the_demo_model_decodes_with_one_thread() -> None:
    assert cpu_threads(read_stage_work(builtin_model_dir()), Role.EPD, CORES, 1).count == 1


@pytest.mark.parametrize("name", [BIND_ENV, COUNT_ENV, WAIT_ENV])
def test_what_the_operator_has_set_wins(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    added = {BIND_ENV: "nobind", COUNT_ENV: "4", WAIT_ENV: "PASSIVE", "OTHER": "ours"}
    monkeypatch.setenv(name, "theirs")
    monkeypatch.setenv("OTHER", "theirs")
    made = stage_environment(added, Path("/run/x"), "cpu")
    assert {key: made[key] for key in added} == {**added, name: "theirs"}


WORKER = """
import json, os, sys, types
import torch

class WorkerWrapperBase:
    rpc_rank = 0
    def init_device(self):
        torch.set_num_threads = None  # as vLLM's CPU worker

module = types.ModuleType("vllm.v1.worker.worker_base")
module.WorkerWrapperBase = WorkerWrapperBase
sys.modules[module.__name__] = module
from epd_serve.engine.bound_threads import bind_threads
bind_threads()
WorkerWrapperBase().init_device()
torch.empty(1 << 20).fill_(1.0)
print(json.dumps([torch.get_num_threads(), sorted(os.sched_getaffinity(0))]))
"""


def worker(**environment: str) -> tuple[int, list[int]]:
    path = {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", WORKER], env={**os.environ, **path, **environment}, capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr.decode()
    count, cores = json.loads(done.stdout)
    return count, cores


def test_a_worker_has_its_threads_on_its_cores_and_no_others() -> None:
    core = max(os.sched_getaffinity(0))
    order = CpuThreads((core,), 1).to_json()
    assert worker(EPD_SERVE_CPU_THREADS=order, VLLM_CPU_OMP_THREADS_BIND="nobind") == (1, [core])


@pytest.mark.parametrize("own", [{"VLLM_CPU_OMP_THREADS_BIND": "0"}, {"OMP_NUM_THREADS": "3"}])
def test_a_worker_leaves_alone_what_the_operator_has_set(own: dict[str, str]) -> None:
    order = CpuThreads((max(os.sched_getaffinity(0)),), 1).to_json()
    _, cores = worker(**{"EPD_SERVE_CPU_THREADS": order, "VLLM_CPU_OMP_THREADS_BIND": "nobind"} | own)
    assert cores == sorted(os.sched_getaffinity(0))
