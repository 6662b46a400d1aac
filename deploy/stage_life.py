"""One life of one stage: its process group, its part of the log, its end. Restarting is `supervisor.py`'s decision."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from deploy import processes
from deploy.stage_log import failure_reason

EXIT_POLL_S = 0.05
KILL_TIMEOUT_S = 5.0
_LOG_TAIL_BYTES = 512 << 10


@dataclass(frozen=True)
class Spawn:
    """What to execute: argv and the complete environment."""

    argv: tuple[str, ...]
    env: Mapping[str, str]


class StageLife:
    """A started process, leader of its own session and group. The creator calls `stop` in the end, always."""

    def __init__(self, process: subprocess.Popen[bytes], log_path: Path, log_start: int) -> None:
        self.pid = process.pid
        self.started = time.monotonic()
        self._process = process
        self._log_path = log_path
        self._log_start = log_start
        self._read_to = log_start
        self._torn = b""

    @classmethod
    def spawn(cls, command: Spawn, log_path: Path) -> StageLife:
        """Start the process; its output is appended to the log.

        Raises:
            OSError: the executable cannot be run.
        """
        with log_path.open("ab") as log:
            start = log.tell()  # first: the process shares the position, and may fail before it is asked for
            return cls(_popen(command.argv, command.env, log), log_path, start)

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    async def exited(self) -> int:
        """Wait for the process to end. The caller bounds the wait."""
        while True:  # a poll, because pidfds and child watchers are missing in some containers
            if (code := self._process.poll()) is not None:
                return code
            await asyncio.sleep(EXIT_POLL_S)

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

    def kill(self) -> None:
        """SIGKILL the whole group, without waiting."""
        processes.signal_group(self.pid, signal.SIGKILL)

    async def stop(self, grace_s: float) -> None:
        """End the whole group: SIGTERM, SIGKILL after `grace_s`; at once SIGKILL when the leader has gone already."""
        if grace_s > 0 and self._process.poll() is None:
            processes.signal_group(self.pid, signal.SIGTERM)
            if await self._gone(grace_s):
                return
        deadline, killing = time.monotonic() + KILL_TIMEOUT_S, processes.Killing()
        while time.monotonic() < deadline:
            killing.strike([process.pid for process in processes.group_members(self.pid)])
            if await self._gone(0.1):
                return

    async def _gone(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while self._process.poll() is None or processes.group_members(self.pid):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(EXIT_POLL_S)
        return True


def _popen(argv: Sequence[str], env: Mapping[str, str], log: BinaryIO) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        argv,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C in the terminal reaches the launcher only; the group is killed as one
    )
