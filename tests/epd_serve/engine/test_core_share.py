"""Our plugin carries out a core order in a worker's process. vLLM's worker and `torch.npu` are stand-ins, the latter
with an NPU's rules; the order of calls is that of `WorkerWrapperBase` and of vllm-ascend's worker."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from epd_serve.cpu_threads import COUNT_ENV, CPU_THREADS_ENV, CpuThreads
from epd_serve.engine import core_share
from epd_serve.engine.argv import CORE_SHARE_ENV, WIRING_ENV
from epd_serve.peers import Peer, write_peers
from epd_serve.roles import Role
from epd_serve.wiring import StageWiring
from npu_ops.core_grants import CoreGrant, CoreOrder, read_grants
from npu_ops.core_limits import CoreLimitError
from tests.epd_serve.engine.test_compat import stub
from tests.fake_npu.cores import FakeCores
from tests.waiting import wait_for

OURS = ("init_device", "execute_model")
"""What our plugin steps into."""


class Worker:
    """What vLLM calls a worker wrapper: `init_device` sets the device and works on it, then a model is loaded."""

    npu = FakeCores()

    def __init__(self, rpc_rank: int = 0) -> None:
        self.rpc_rank = rpc_rank
        self.loaded = False

    def init_device(self) -> None:
        self.npu.set_device(f"npu:{self.rpc_rank}")
        self.npu.work()

    def execute_model(self, scheduler_output: object) -> None:
        self.npu.work()

    def start(self) -> None:
        self.init_device()
        self.loaded = True


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> type[Worker]:
    cores = FakeCores(devices=2)
    fresh = type("Fresh", (Worker,), {name: getattr(Worker, name) for name in OURS} | {"npu": cores})
    stub(monkeypatch, "vllm.v1.worker.worker_base", WorkerWrapperBase=fresh)
    monkeypatch.setattr(torch, "npu", cores, raising=False)
    return fresh


def order(monkeypatch: pytest.MonkeyPatch, folder: Path, device: str, **more: Any) -> CoreOrder:
    made = CoreOrder(device, "E0", {"E0": 0.3, "P0": 0.7}, report=str(folder / "E0.cores{rank}.json"), **more)
    monkeypatch.setenv(CORE_SHARE_ENV, made.to_json())
    return made


def test_without_an_order_nothing_is_touched(worker: type[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CORE_SHARE_ENV, raising=False)
    before = (worker.init_device, worker.npu.set_device)
    core_share.obey()
    assert (worker.init_device, worker.npu.set_device) == before


def test_on_an_npu_every_worker_is_limited_on_the_way_and_says_so(
    worker: type[Worker], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = order(monkeypatch, tmp_path, "npu")
    core_share.obey()
    with caplog.at_level(logging.INFO):
        worker(1).start()
    grant = CoreGrant(1, 0.3, {"cube": 7, "vector": 14}, {"cube": 24, "vector": 48})
    assert json.loads(Path(made.report.format(rank=1)).read_text())["cores"] == {"cube": 7, "vector": 14}
    assert read_grants(made.report, 2) == (grant,)
    assert worker.npu.broken == []
    assert "core share 0.3 of E0: 7 of 24 cube, 14 of 48 vector" in caplog.text


def test_an_npu_with_unknown_cores_ends_the_worker_before_a_model_loads(
    worker: type[Worker], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    order(monkeypatch, tmp_path, "npu")
    worker.npu.cube = 0
    core_share.obey()
    started = worker()
    with pytest.raises(CoreLimitError, match="--core-share"):
        started.start()
    assert not started.loaded and not worker.npu.limits


def test_a_worker_that_sets_its_npu_otherwise_is_not_left_without_a_limit(
    worker: type[Worker], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    order(monkeypatch, tmp_path, "npu")
    monkeypatch.setattr(worker, "init_device", lambda self: None)
    core_share.obey()
    started = worker()
    with pytest.raises(CoreLimitError, match=r"worker 0 of E0 .* without torch.npu.set_device"):
        started.start()
    assert not started.loaded


def test_a_plugin_that_vllm_loads_twice_limits_once(
    worker: type[Worker], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = order(monkeypatch, tmp_path, "npu")
    core_share.obey()
    core_share.obey()
    worker().start()
    assert worker.npu.broken == [] and len(read_grants(made.report, 1)) == 1


def test_a_grant_that_cannot_be_written_costs_the_report_not_the_worker(
    worker: type[Worker], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    order(monkeypatch, tmp_path / "gone", "npu")
    core_share.obey()
    started = worker()
    started.start()
    assert started.loaded and "cannot say which cores it got" in caplog.text


@pytest.mark.parametrize("enforced", [True, False])
def test_on_cuda_the_worker_says_how_many_sms_it_sees_once_its_device_is_set(
    worker: type[Worker], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, enforced: bool
) -> None:
    made = order(monkeypatch, tmp_path, "cuda", enforced=enforced)
    seen: list[str] = []

    def grant(rank: int, of: CoreOrder) -> CoreGrant:
        seen.append("device set" if worker.npu._current is not None else "no device")
        return CoreGrant(rank, of.share, {"sm": 39}, enforced=of.enforced)

    monkeypatch.setattr(core_share, "cuda_grant", grant)
    core_share.obey()
    worker().start()
    assert seen == ["device set"]
    assert read_grants(made.report, 1) == (CoreGrant(0, 0.3, {"sm": 39}, enforced=enforced),)


def test_on_cpu_a_worker_that_computes_elsewhere_loads_no_model(
    worker: type[Worker], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    order(monkeypatch, tmp_path, "cpu", cores=(10_000,))
    core_share.obey()
    started = worker()
    with pytest.raises(CoreLimitError, match=r"not on \[10000\] alone"):
        started.start()
    assert worker.npu._current is None and not started.loaded


ON_CPU = """
import json, os, sys, time, types
from pathlib import Path
import psutil, torch

class WorkerWrapperBase:
    rpc_rank = 0
    def init_device(self):
        self.step()
    def execute_model(self, scheduler_output):
        self.step()
    def step(self):
        torch.empty(1 << 22).fill_(1.0)

module = types.ModuleType("vllm.v1.worker.worker_base")
module.WorkerWrapperBase = WorkerWrapperBase
sys.modules[module.__name__] = module
from epd_serve.engine.core_share import obey
from epd_serve.engine.worker_threads import rule_threads
obey()
rule_threads()

def on():
    found = {}
    for thread in psutil.Process().threads():
        found.setdefault(tuple(sorted(os.sched_getaffinity(thread.id))), []).append(thread.id)
    return [[cores, len(threads), os.getpid() in threads] for cores, threads in found.items()]

worker = WorkerWrapperBase()
worker.init_device()
for line in sys.stdin:
    worker.execute_model(None)
    print(json.dumps([on(), torch.get_num_threads()]), flush=True)
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="threads move between two cores")
def test_on_cpu_threads_move_while_the_worker_runs_and_their_number_follows(tmp_path: Path) -> None:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    report, peers = str(tmp_path / "E0.cores{rank}.json"), tmp_path / "peers"
    me = Peer("E0", Role.E, cores=(first,), core_share=0.5)
    write_peers(peers, [me])
    environment = {
        **{name: value for name, value in os.environ.items() if name != COUNT_ENV},
        "PYTHONPATH": str(Path(__file__).parents[3]),
        CORE_SHARE_ENV: CoreOrder("cpu", "E0", {"E0": 0.5, "P0": 0.5}, (first,), report=report).to_json(),
        CPU_THREADS_ENV: CpuThreads((first,), 2).to_json(),
        WIRING_ENV: json.dumps(StageWiring("E0", Role.E, "life", peers=str(peers)).to_json()),
    }
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", ON_CPU], env=environment, stdin=pipe, stdout=pipe, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            for cores in ((first,), (second,), (first, second), (first,)):
                write_peers(peers, [replace(me, cores=cores, core_share=len(cores) / 2)])
                wanted = (CoreGrant(0, len(cores) / 2, {"cpu": len(cores)}, core_ids=cores),)
                wait_for(lambda wanted=wanted: read_grants(report, 1) == wanted, f"threads on {cores}", 10)
                print("step", file=process.stdin, flush=True)
                on, count = json.loads(process.stdout.readline())
                assert count == len(cores)
                assert [list(cores), True] in [[where, model] for where, _, model in on], "the model's own thread"
                pinned = [where for where, _, _ in on if len(where) == 1]
                assert all(where == list(cores) for where in pinned)
        finally:
            process.kill()
