"""The children of this process by name: started or adopted, collected exactly once, their ends kept until asked for.

A table without a thread, an event loop or a wait. Its owner calls `collect` when a child may have ended. An entry is
also where something is noted beside a process, or before there is one: a tag that says nothing here, and a descriptor
that is to outlive whoever opened it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from epd_serve.lifeline import adopt_orphans

PASSED_FROM = 3
"""The number of the first descriptor that is passed to a child."""

_ABOVE_PASSED = 64  # copies on their way to a child are out of the way of those that are put in place before them


@dataclass
class Kept:
    """One entry.

    Attributes:
        pid: of its last process; None where there was none.
        code: how that ended: an exit code, or minus a signal; None while it runs.
        descriptor: noted with it, ours; None for none.
    """

    name: str
    tag: bytes = b""
    pid: int | None = None
    code: int | None = None
    descriptor: int | None = None

    @property
    def running(self) -> bool:
        return self.pid is not None and self.code is None


@dataclass(frozen=True)
class Exit:
    """The end of an entry's process."""

    name: str
    pid: int
    code: int


class Children:
    """The table. Makes this process the one to which orphans below it come, so that they can be adopted."""

    def __init__(self) -> None:
        adopt_orphans()
        _keep_descriptors_to_ourselves()
        self.kept: dict[str, Kept] = {}

    def spawn(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        output: int,
        passed: Sequence[int] = (),
        tag: bytes = b"",
    ) -> Kept:
        """Start a program in a session of its own, with an empty stdin.

        Args:
            output: descriptor that becomes its stdout and stderr.
            passed: descriptors that it finds as 3, 4, 5 and so on.
            tag: of the entry; an empty one leaves what was noted, as the descriptor is left.

        Raises:
            ValueError: the name runs. OSError: the program cannot be executed.
        """
        kept = self._free(name)
        copies = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, _ABOVE_PASSED) for one in (output, *passed)]
        try:
            pid = os.posix_spawnp(
                argv[0],
                tuple(argv),
                env,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    *((os.POSIX_SPAWN_DUP2, copies[0], standard) for standard in (1, 2)),
                    *((os.POSIX_SPAWN_DUP2, copy, PASSED_FROM + at) for at, copy in enumerate(copies[1:])),
                ],
                setsid=True,
                setsigmask=(),
                setsigdef=(signal.SIGPIPE, signal.SIGXFSZ),  # ignored by Python, and by what it executes if not reset
            )
        finally:
            for copy in copies:
                os.close(copy)
        return self._runs(kept, pid, tag)

    def adopt(self, name: str, pid: int, *, tag: bytes = b"") -> Kept:
        """Take in an orphan that has come to this process.

        Raises:
            ValueError: the name runs, or the process has one. ProcessLookupError: it is no living child of ours.
        """
        kept = self._free(name)
        if self.runs(pid):
            raise ValueError(f"process {pid} has a name already")
        if not _lives(pid):
            raise ProcessLookupError(f"process {pid} is no living child of process {os.getpid()}")
        return self._runs(kept, pid, tag)

    def runs(self, pid: int) -> bool:
        """Whether it is a running process of an entry."""
        return any(kept.running and kept.pid == pid for kept in self.kept.values())

    def note(self, name: str, tag: bytes, descriptor: int | None = None) -> None:
        """Set the tag of an entry, and a copy of the descriptor in place of an older one. Makes one that is missing."""
        kept = self.kept.setdefault(name, Kept(name))
        kept.tag = tag
        if descriptor is not None:
            copy = os.dup(descriptor)
            _close(kept)
            kept.descriptor = copy

    def forget(self, name: str) -> None:
        """Remove an entry, if there is one.

        Raises:
            ValueError: it runs.
        """
        _close(self._free(name))
        self.kept.pop(name, None)

    def collect(self) -> list[Exit]:
        """Those of the table that have ended since the last call, and no other child of this process."""
        ended = []
        for kept in self.kept.values():
            if kept.pid is not None and kept.running:
                pid, status = os.waitpid(kept.pid, os.WNOHANG)
                if pid:
                    ended.append(self._ended(kept, status))
        return ended

    def ended(self, pid: int, status: int) -> Exit | None:
        """Take in what `waitpid` has said of a child; None where it is none of the table."""
        kept = next((one for one in self.kept.values() if one.running and one.pid == pid), None)
        return self._ended(kept, status) if kept is not None else None

    def close(self) -> None:
        """Close the descriptors. Processes go on."""
        for kept in self.kept.values():
            _close(kept)

    def _free(self, name: str) -> Kept:
        kept = self.kept.get(name) or Kept(name)
        if kept.running:
            raise ValueError(f"{name} runs: process {kept.pid}")
        return kept

    def _runs(self, kept: Kept, pid: int, tag: bytes) -> Kept:
        kept.pid, kept.code, kept.tag = pid, None, tag or kept.tag
        self.kept[kept.name] = kept
        return kept

    def _ended(self, kept: Kept, status: int) -> Exit:
        assert kept.pid is not None, "it ran"
        kept.code = os.waitstatus_to_exitcode(status)
        return Exit(kept.name, kept.pid, kept.code)


def _keep_descriptors_to_ourselves() -> None:
    """Python opens none that a program inherits, but whoever has started us may have left some."""
    for one in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing
            if int(one) > 2:  # stdin, stdout and stderr are
                os.set_inheritable(int(one), False)


def _lives(pid: int) -> bool:
    """Whether it is a child of ours that runs. One that has ended is collected."""
    try:
        return pid > 0 and os.waitpid(pid, os.WNOHANG) == (0, 0)
    except ChildProcessError:
        return False


def _close(kept: Kept) -> None:
    if kept.descriptor is not None:
        os.close(kept.descriptor)
        kept.descriptor = None
