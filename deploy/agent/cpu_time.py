"""CPU time of the processes of a launch, by the kernel's own accounts: who works during a request, who when idle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from deploy.agent.template import api_server_of
from deploy.host.processes import group_members, running


def groups(root: Path) -> dict[str, int]:
    """The newest process group of each instance, from the run directory."""
    lines = [line for path in root.glob("*/groups.jsonl") for line in path.read_text(encoding="utf-8").splitlines()]
    return {entry["instance"]: entry["pid"] for entry in map(json.loads, lines)}


Parts = Mapping[str, tuple[int, ...]]
"""Process ids by part of a launch: `proxy`, `E0/api`, `E0/engine`, …"""


def parts(launcher: int, groups: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """The parts of a launch that runs: per stage its API server (with the process that both are forked from) and what
    that spawned, and all else as `proxy`: front doors, controller, agent and the process whose children they are.

    Args:
        groups: process group of each instance.
    """
    others = (one.pid for one in running() if one.parent == launcher and one.pid not in groups.values())
    found: dict[str, tuple[int, ...]] = {"proxy": (launcher, *others)}
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
