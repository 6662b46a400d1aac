"""One life of one stage: its process group, its part of the log, its end; and the record of all its lives, with which a
supervisor goes on where another one has ended. Restarting is `supervisor.py`'s decision."""

from __future__ import annotations

import asyncio
import signal
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from deploy.agent.stage_log import failure_reason
from deploy.host import processes
from deploy.host.children import Child, Children
from deploy.runtime.protocol import Phase

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


@dataclass
class Record:
    """Values that outlive the process that has written them. Times are of the machine's monotonic clock, seconds.

    Attributes:
        phase: STARTING, also before the first life and until the next one has begun; UP; DOWN, between two lives or
            while the rest of one is cleared away.
        incarnation: of this life, or of the last one; "" before the first.
        pid, born_ticks, log_start, began_at: of the process of this life; 0 as long as there is none.
        up_at: when this life answered; 0 until then. start_s: how long that took.
        ever_up: it has answered once. over: it is not started again.
        reason: why it was down last. lives: begun so far.
        short_lives: in a row that did not settle.
        delay_s: between the last two lives, or from the end of this one to the next.
        next_at: when the next life begins; 0 where that is not decided.
    """

    phase: Phase = Phase.STARTING
    incarnation: str = ""
    pid: int = 0
    born_ticks: int = 0
    log_start: int = 0
    began_at: float = 0.0
    up_at: float = 0.0
    start_s: float = 0.0
    ever_up: bool = False
    over: bool = False
    reason: str = ""
    lives: int = 0
    short_lives: int = 0
    delay_s: float = 0.0
    next_at: float = 0.0

    def begins(self, log_start: int) -> None:
        """Another life is about to be spawned."""
        self.phase, self.incarnation = Phase.STARTING, uuid.uuid4().hex[:12]
        self.pid, self.born_ticks, self.log_start, self.began_at = 0, 0, log_start, 0.0
        self.up_at = self.start_s = self.next_at = 0.0

    def spawned(self, life: StageLife) -> None:
        """It is there, and has done nothing yet. In the place of one that could not go on it is the same life."""
        if not self.pid:
            self.lives += 1
        self.pid, self.born_ticks, self.began_at = life.pid, life.born_ticks, life.started

    def answers(self) -> None:
        """This life, for the first time."""
        self.phase, self.ever_up, self.reason = Phase.UP, True, ""
        self.up_at = time.monotonic()
        self.start_s = self.up_at - self.began_at

    @property
    def up_s(self) -> float:
        return time.monotonic() - self.up_at if self.up_at else 0.0

    def falls(self, reason: str, delay_s: float) -> None:
        """This life ends, or has ended, or could not begin."""
        self.phase, self.reason, self.delay_s = Phase.DOWN, reason, delay_s
        self.short_lives = self.short_lives + 1 if delay_s else 0
        self.up_at = self.start_s = self.next_at = 0.0

    def waits(self) -> None:
        """Nothing of this life is left; the next one begins when its delay is over."""
        self.pid, self.next_at = 0, time.monotonic() + self.delay_s

    def ends(self, reason: str) -> None:
        """For good."""
        self.falls(reason or self.reason, 0.0)
        self.over = True
