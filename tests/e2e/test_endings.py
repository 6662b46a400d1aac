"""How a launch ends, with real stages: nothing of it remains. (Ctrl-C is checked at the end of every launch.)"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from deploy.host import processes
from tests.e2e.serving import Serving
from tests.waiting import wait_for

pytestmark = pytest.mark.slow


def _shared_memory_of(group: int) -> set[Path]:
    """Files of /dev/shm that the processes of a group have mapped."""
    lines = [line for member in processes.group_members(group) for line in _maps(member.pid)]
    return {Path(line.split()[-1]) for line in lines if "/dev/shm/" in line and "(deleted)" not in line}


def _maps(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/maps").read_text().splitlines()


@pytest.mark.promise("nothing-left")
def test_after_kill_9_of_the_launcher_the_next_start_cleans_up() -> None:
    launch = Serving("E-PD").wait_ready()
    try:
        groups = [json.loads(line)["pid"] for line in (launch.run / "groups.jsonl").read_text().splitlines()]
        run, left = launch.run, launch.shared_memory()
        theirs = {path for group in groups for path in _shared_memory_of(group)}
        assert theirs, "vLLM has message queues in shared memory"
        assert theirs <= set(left), "all that a stage maps is known by its name"
        killed = [process for group in groups for process in processes.group_members(group)]
        for process in killed:
            if b"resource_tracker" in Path(f"/proc/{process.pid}/cmdline").read_bytes():
                os.kill(process.pid, signal.SIGKILL)  # nobody unlinks for the stages
        os.kill(launch.process.pid, signal.SIGKILL)
        launch.process.wait(timeout=5)
        for group in groups:
            wait_for(lambda g=group: not processes.group_members(g), "the stages to die with their launcher", 15)
        successor = Serving("TP1", "--run-root", str(launch.root / "run"))
        try:
            wait_for(lambda: not run.exists() and not any(map(Path.exists, left)), "the next start to clean up", 30)
            successor.wait_ready()
            successor.process.send_signal(signal.SIGTERM)
            assert successor.process.wait(timeout=20) == 0
        finally:
            successor.destroy()
    finally:
        launch.destroy()


def test_a_stage_that_was_killed_with_all_its_children_leaves_nothing_when_it_is_back() -> None:
    launch = Serving("E-PD").wait_ready()
    try:
        before, first = set(launch.shared_memory()), launch.stage_pid("E0")
        made = {path for path in before if "-stage-E0-" in path.name}
        assert {path.name.startswith("sem.") for path in made} == {True, False}
        members = processes.group_members(first)
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for member in members:
                os.kill(member.pid, number)
        wait_for(lambda: launch.stage_pid("E0") != first, "a new life", 30)
        launch.wait_ready()
        after = set(launch.shared_memory())
        assert not made & after
        assert len(after) == len(before), "as much as one life makes"
        launch.stop()
    finally:
        launch.destroy()


def test_a_stage_that_cannot_start_ends_the_launch_with_its_reason() -> None:
    launch = Serving("TP1", "--stage-args", "EPD:--max-num-batched-tokens 1")
    try:
        assert launch.process.wait(timeout=180) == 1
        said = launch.log.read_text()
        assert "EPD0" in said
        assert "max_num_batched_tokens" in said
        assert "Traceback" not in said
    finally:
        launch.destroy()
