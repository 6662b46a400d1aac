"""Shared memory of a stage is known by its name, also when all processes that knew it were killed at once."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from multiprocessing import shared_memory
from pathlib import Path
from types import SimpleNamespace

import pytest

from deploy.host import processes
from deploy.host.rundir import RunDir
from epd_serve.engine.memory_names import _name_rank_memory
from epd_serve.stage_plan import MEMORY_NAMES_ENV
from tests.waiting import wait_for

ROOT = Path(__file__).parents[3]
STAGE = """
import multiprocessing, sys, time
from multiprocessing import shared_memory

def make(said):
    from epd_serve.engine.memory_names import name_memory
    name_memory()  # vLLM loads our plugin in every process
    kept = shared_memory.SharedMemory(create=True, size=16), multiprocessing.get_context("spawn").Semaphore()
    said.put(kept[0].name)
    time.sleep(600)

if __name__ == "__main__":
    from epd_serve.engine.memory_names import name_memory
    name_memory()
    context = multiprocessing.get_context("spawn")
    said = context.Queue()
    block = shared_memory.SharedMemory(create=True, size=16)
    for method in ("spawn", "fork"):
        multiprocessing.get_context(method).Process(target=make, args=(said,), daemon=True).start()
        said.get(timeout=60)
    print("made", flush=True)
    time.sleep(600)
"""


def test_what_a_stage_made_goes_with_its_launch_after_all_its_processes_were_killed_at_once(tmp_path: Path) -> None:
    run = RunDir(secrets.token_hex(4), tmp_path / "run", Path("/dev/shm"))
    foreign = shared_memory.SharedMemory(create=True, size=16)
    (tmp_path / "stage.py").write_text(STAGE)
    before = set(os.listdir("/dev/shm"))
    stage = subprocess.Popen(
        [sys.executable, str(tmp_path / "stage.py")],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), MEMORY_NAMES_ENV: run.memory_names("E0")},
    )
    try:
        assert stage.stdout is not None
        assert stage.stdout.readline() == "made\n"
        made = {name for name in set(os.listdir("/dev/shm")) - before if "psm_" in name or name.startswith("sem.")}
        ours = {name for name in made if run.launch_id in name}
        assert len([name for name in ours if name.startswith("sem.")]) >= 2, "of the parent's queue, of the children"
        assert len([name for name in ours if name.startswith(f"{run.memory_names('E0')}psm_")]) == 3
        members = processes.group_members(stage.pid)
        for number in (signal.SIGSTOP, signal.SIGKILL):  # the resource tracker, too: nobody can clear up
            for member in members:
                os.kill(member.pid, number)
        stage.wait(10)
        wait_for(lambda: not processes.group_members(stage.pid))
        assert ours <= set(os.listdir("/dev/shm")), "the kernel removes no names"
        run.clear_instance("E0")
        assert not ours & set(os.listdir("/dev/shm"))
        assert foreign.name in os.listdir("/dev/shm")
    finally:
        foreign.close()
        foreign.unlink()
        run.remove()


def test_vllm_s_memory_of_cpu_ranks_has_the_stage_s_name_before_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    module = pytest.importorskip("vllm.distributed.device_communicators.cpu_communicator")
    own = module._CPUSHMDistributed.make_group_name
    monkeypatch.setattr(module._CPUSHMDistributed, "make_group_name", staticmethod(own))  # put back at the end
    monkeypatch.setenv(MEMORY_NAMES_ENV, "epd-1234-stage-E0-")
    monkeypatch.setenv("VLLM_DIST_IDENT", "4711")
    group = SimpleNamespace(unique_name="tp:0", ranks=[0, 1])
    _name_rank_memory(0)
    name = module._CPUSHMDistributed.make_group_name(group)
    assert name == f"epd-1234-stage-E0-{own(group)}"
    assert "4711" in name
