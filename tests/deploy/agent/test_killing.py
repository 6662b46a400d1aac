"""The end of a process group leaves no shared memory, whatever state the group is in."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from multiprocessing import shared_memory
from pathlib import Path

from deploy.host import processes
from tests.waiting import PATIENCE_S, wait_for

OWNER = """
import sys, time
from multiprocessing import shared_memory
memory = shared_memory.SharedMemory(create=True, size=16)
print(memory.name, flush=True)
time.sleep(600)
"""


def states(group: int) -> list[str]:
    pids = [member.pid for member in processes.group_members(group)]
    return [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in pids]


def test_a_stopped_group_is_killed_and_its_shared_memory_unlinked() -> None:
    child = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert child.stdout is not None
        name = child.stdout.readline().strip()
        # The tracker has read what it is to unlink, and waits for more.
        wait_for(lambda: states(child.pid) == ["S", "S"])
        os.killpg(child.pid, signal.SIGSTOP)
        killing = processes.Killing()
        deadline = time.monotonic() + processes.TRACKER_S + PATIENCE_S
        while (members := processes.group_members(child.pid)) and time.monotonic() < deadline:
            killing.strike([member.pid for member in members])
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=0.02)  # or it stays in the group, dead
        assert not members
        with contextlib.suppress(FileNotFoundError):
            shared_memory.SharedMemory(name).unlink()
            raise AssertionError(f"/dev/shm/{name} remains")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait(PATIENCE_S)
