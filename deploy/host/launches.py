"""The launches of this user here. Those that run are found: those that keep features, those that take commands.
What launchers have left that were killed is removed: their process groups, run directories and shared memory.

Normally the kernel has already ended the stages (each asks to die with its parent); this is for what it could not,
and for the files. Only what is proven to belong to a dead launch is touched.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from deploy.host import processes
from deploy.host.environment import LAUNCH_ENV, run_root, shm_root
from deploy.host.rundir import (
    HELD,
    RunDir,
    held_in,
    is_held,
    is_of_this_namespace,
    launches_in,
    read_groups,
    read_instances,
)
from epd_serve.errors import ConfigError, EpdError

ADMIN_SOCKET = "admin.sock"
"""In the run directory of a launch that takes commands."""


class NoLaunchError(EpdError):
    """Nothing runs that could be asked."""


@dataclass(frozen=True)
class RunningLaunch:
    """One launch."""

    id: str
    path: Path
    arena: Path

    def __str__(self) -> str:
        return f"{self.id} ({', '.join(read_instances(self.path))})"


def running_launches(root: Path | None = None, *, keeps: str = "") -> list[RunningLaunch]:
    """In the order of their ids.

    Args:
        keeps: only those with a file of this name in their run directory; with an arena, if none is given.
    """
    root = root or run_root()
    found = []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        launch = RunningLaunch(path.name, path, RunDir(path.name, path, shm_root()).arena)
        if is_held(path / HELD) and (path / keeps if keeps else launch.arena).exists():
            found.append(launch)
    return found


def choose_launch(launch_id: str | None, root: Path | None = None, *, keeps: str = "") -> RunningLaunch:
    """The launch of this id (or its beginning), or the only one there is.

    Raises:
        NoLaunchError: nothing runs.
        ConfigError: several run and none or a wrong one is named; lists them.
    """
    launches = running_launches(root, keeps=keeps)
    if not launches:
        raise NoLaunchError(f"no launch of this user runs here that {'takes commands' if keeps else 'keeps features'}")
    chosen = [one for one in launches if launch_id is None or one.id.startswith(launch_id)]
    if len(chosen) == 1:
        return chosen[0]
    listed = ", ".join(map(str, launches))
    if launch_id is None:
        raise ConfigError(f"several launches run; name one by --launch: {listed}", param="--launch")
    raise ConfigError(f"no single launch {launch_id!r}; there are: {listed}", param="--launch")


KILL_TIMEOUT_S = 5.0


def reap_dead(root: Path | None = None) -> list[str]:
    """Remove every dead launch: those under the run root, and those of which only shared memory is left.

    Shared memory outlives its run directory where a container was restarted: /dev/shm is its pod's, /tmp was its own.

    Returns:
        Ids of the launches that were cleaned up.
    """
    root, shm = root or run_root(), shm_root()
    ours = root.is_dir() and root.lstat().st_uid == os.getuid()
    dead = sorted(path.name for path in root.iterdir() if is_held(path / HELD) is False) if ours else []
    dead += [one for one in launches_in(shm) if one not in dead and is_held(held_in(shm, one)) is False]
    for launch_id in dead:
        kill_leftovers(root / launch_id)
        RunDir(launch_id, root / launch_id, shm).remove()
    return dead


def kill_leftovers(run_path: Path) -> None:
    """SIGKILL the processes of a dead launch and wait until they are gone (bounded)."""
    deadline, killing = time.monotonic() + KILL_TIMEOUT_S, processes.Killing()
    groups = read_groups(run_path) if is_of_this_namespace(run_path) else {}
    while victims := _victims(run_path.name, groups):
        killing.strike(victims)
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)


def _victims(launch_id: str, groups: dict[int, int]) -> list[int]:
    """Processes of the launch: those that carry its mark, and members of recorded groups.

    A group's number may have been reused since. It is still ours when its leader is the process that was recorded, or
    when the leader has gone (the number cannot be reused while members live) and a member is as old as the record says.
    """
    found = []
    for process in processes.running():
        if process.pid == os.getpid():
            continue
        recorded = groups.get(process.group)
        in_group = recorded is not None and _same_group(process.group, recorded, process)
        if in_group or processes.has_environment(process.pid, LAUNCH_ENV, launch_id):
            found.append(process.pid)
    return found


def _same_group(group: int, recorded_ticks: int, member: processes.ProcessStat) -> bool:
    leader = processes.stat(group)
    if leader is not None:
        return leader.start_ticks == recorded_ticks
    return member.start_ticks >= recorded_ticks and _looks_like_a_stage(member.pid)


def _looks_like_a_stage(pid: int) -> bool:
    """vLLM's children rename themselves, which may overwrite their environment: then the name tells."""
    command = processes.command_line(pid).lower()
    return any(name in command for name in (b"vllm", b"epd_serve", b"multiprocessing"))
