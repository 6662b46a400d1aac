"""One life of one stage: its process group, its part of the log, its end. Restarting is `supervisor.py`'s decision."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from deploy.agent.stage_log import failure_reason
from deploy.host import processes
from deploy.host.children import Child, Children

EXIT_POLL_S = 0.05
KILL_TIMEOUT_S = 5.0
_LOG_TAIL_BYTES = 512 << 10


@dataclass(frozen=True)
class Spawn:
    """What to start: argv and the complete environment."""

    argv: tuple[str, ...]
    env: Mapping[str, str]


Noted = Callable[[Child], None]
"""Told of a process before it does anything."""

Start = Callable[[Spawn, BinaryIO, Noted], Awaitable[Child]]
"""Starts a process that writes to the log; OSError when it cannot."""


def executed(children: Children) -> Start:
    """Starts a command as a program of its own."""

    async def start(command: Spawn, log: BinaryIO, noted: Noted) -> Child:
        return await children.spawn(command.argv, command.env, output=log.fileno(), noted=noted)

    return start


class StageLife:
    """A started process with its group. The creator calls `stop` in the end, always.

    Args:
        log_start: where its part of the log begins.
        started: when, by the monotonic clock; 0: now.
    """

    def __init__(self, process: Child, log_path: Path, log_start: int, started: float = 0.0) -> None:
        self.pid = process.pid
        self.started = started or time.monotonic()
        self.born_ticks = process.born_ticks
        self._process = process
        self._log_path = log_path
        self._log_start = log_start
        self._read_to = log_start
        self._torn = b""

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    async def exited(self) -> int:
        """Wait for the process to end. The caller bounds the wait."""
        return await self._process.exited()

    def new_log_lines(self) -> list[str]:
        """Complete lines written since the last call."""
        with self._log_path.open("rb") as log:
            log.seek(self._read_to)
            chunk = log.read(1 << 20)
        self._read_to += len(chunk)
        *lines, self._torn = (self._torn + chunk).split(b"\n")
        return [line.decode(errors="replace") for line in lines]

    def log_text(self) -> str:
        """The end of what this life wrote."""
        with self._log_path.open("rb") as log:
            size = log.seek(0, 2)
            log.seek(max(self._log_start, size - _LOG_TAIL_BYTES))
            return log.read().decode(errors="replace")

    def failure_reason(self) -> str:
        return failure_reason(self.log_text(), self.exit_code)

    async def stop(self, grace_s: float, by: signal.Signals = signal.SIGTERM) -> None:
        """End the whole group: a signal, SIGKILL after `grace_s`; at once SIGKILL when the leader has gone already."""
        if grace_s > 0 and self._process.poll() is None:
            if not self._number_is_reused():
                processes.signal_group(self.pid, by)
            if await self._gone(grace_s):
                return
        deadline, killing = time.monotonic() + KILL_TIMEOUT_S, processes.Killing()
        while time.monotonic() < deadline:
            killing.strike([process.pid for process in self._members()])
            if await self._gone(0.1):
                return

    async def _gone(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while self._process.poll() is None or self._members():
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(EXIT_POLL_S)
        return True

    def _members(self) -> list[processes.ProcessStat]:
        return [] if self._number_is_reused() else processes.group_members(self.pid)

    def _number_is_reused(self) -> bool:
        """Whether the leader's pid is another process's by now, which it can be once all of the group have gone."""
        leader = processes.stat(self.pid)
        return leader is not None and leader.start_ticks != self.born_ticks
