"""Who a process is, beyond its pid: start time, process group, marks in its environment (Linux /proc).

A pid alone may belong to somebody else by the time it is used; a pid with its start time in clock ticks does not. Those
are kept in files, so they are the kernel's own: psutil tells seconds of a clock that may be set, and no groups.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

TRACKER_S = 3.0


@dataclass(frozen=True)
class ProcessStat:
    """From /proc/<pid>/stat. `name`: 15 characters at most; `start_ticks`: clock ticks since boot."""

    pid: int
    name: str
    state: str
    parent: int
    group: int
    start_ticks: int

    @property
    def dead(self) -> bool:
        """Exited, waiting to be collected: holds no memory, port or file."""
        return self.state in "ZX"


def stat(pid: int) -> ProcessStat | None:
    """The process, or None when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    end = text.rindex(")")  # the name in parentheses may hold anything
    rest = text[end + 2 :].split()
    name = text[text.index("(") + 1 : end]
    return ProcessStat(pid, name, rest[0], parent=int(rest[1]), group=int(rest[2]), start_ticks=int(rest[19]))


def running() -> Iterator[ProcessStat]:
    """All processes that are not dead."""
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            found = stat(int(entry.name))
            if found is not None and not found.dead:
                yield found


def group_members(group: int) -> list[ProcessStat]:
    """Running processes of a process group."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return []  # spares the walk through /proc
    except PermissionError:
        pass  # exists, changed user: look
    return [process for process in running() if process.group == group]


def has_environment(pid: int, name: str, value: str) -> bool:
    """Was the process started with `name=value`? False when its environment may not be read."""
    try:
        return f"{name}={value}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def pid_namespace() -> str:
    """Pids of another namespace (a container that shares /tmp) mean nothing here."""
    return os.readlink("/proc/self/ns/pid")


def signal_group(group: int, number: signal.Signals) -> None:
    """Signal a process group; one that has gone is no error."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the number belongs to somebody else by now
        os.killpg(group, number)


def signal_process(pid: int, number: signal.Signals) -> None:
    """Signal one process; one that has gone is no error."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


class Killing:
    """Ends processes by SIGKILL, Python's resource trackers last.

    When the processes that a tracker serves are gone it unlinks the shared memory they left in /dev/shm, and ends. It
    gets `TRACKER_S` for that, counted from when nothing but trackers is left.
    """

    def __init__(self) -> None:
        self._trackers_alone_since: float | None = None

    def strike(self, members: Sequence[int]) -> None:
        """Kill what may be killed now; call again until nobody is left."""
        others = [pid for pid in members if b"multiprocessing.resource_tracker" not in command_line(pid)]
        if others:
            self._trackers_alone_since = None
        elif self._trackers_alone_since is None:
            self._trackers_alone_since = time.monotonic()
            for pid in members:  # one that was stopped with its stage could do nothing
                signal_process(pid, signal.SIGCONT)
        elif time.monotonic() > self._trackers_alone_since + TRACKER_S:
            others = list(members)
        for pid in others:
            signal_process(pid, signal.SIGKILL)


def command_line(pid: int) -> bytes:
    """Its arguments, each ended by a zero byte; b"" where it has gone or may not be read."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def environment_of(pid: int, without: Sequence[str] = ()) -> dict[str, str]:
    """What a process of this user was started with, but for names that begin with one of `without`.

    Raises:
        psutil.Error: it has gone, or is somebody else's.
    """
    found = psutil.Process(pid).environ()
    return {name: value for name, value in found.items() if not name.startswith(tuple(without))}
