"""CPU time of a launch by process, from the kernel's own accounts: who works during a request, who works when idle."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from deploy.agent.template import api_server_of
from deploy.host.processes import group_members

Parts = Mapping[str, tuple[int, ...]]
"""Process ids by part of a launch: `proxy`, `E0/api`, `E0/engine`, …"""


def parts(launcher: int, groups: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """The parts of a launch that runs: launcher with proxy, and per stage its API server (with the process that
    both are forked from) and what that spawned.

    Args:
        groups: process group of each instance.
    """
    found: dict[str, tuple[int, ...]] = {"proxy": (launcher,)}
    for instance, group in groups.items():
        api = {group, api_server_of(group)}
        found[f"{instance}/api"] = tuple(sorted(api))
        found[f"{instance}/engine"] = tuple(one.pid for one in group_members(group) if one.pid not in api)
    return found


def cpu_seconds(launch: Parts) -> dict[str, float]:
    """CPU seconds of the living threads of each part so far (nanosecond accounts, not clock ticks)."""
    return {part: sum(map(_on_cpu_s, pids)) for part, pids in launch.items()}


def since(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """CPU seconds spent between two readings; never negative, though a thread that ended takes its account along."""
    return {part: max(0.0, seconds - before.get(part, 0.0)) for part, seconds in now.items()}


def _on_cpu_s(pid: int) -> float:
    spent_ns = 0
    for thread in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            spent_ns += int(thread.read_text(encoding="ascii").split()[0])
        except (FileNotFoundError, ProcessLookupError):
            continue  # the thread has ended
    return spent_ns / 1e9
