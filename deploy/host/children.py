"""Processes that outlive the one that has them started: children of its root, known by pid and start time.

The root (`root.py`) is the parent of all processes of a deployment and reaps them; it may be this process itself. Who
is there is for the callers to write down (`state.py`): a process that is started does nothing before its caller has
been told its pid, and ends by itself where the caller ends first.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from deploy.host import processes
from deploy.host.spawned import GO, PID
from epd_serve.lifeline import adopt_orphans

PASSED_FROM = 3
"""The number of the first descriptor that is passed to a child."""

UNKNOWN_EXIT = 255
"""Of a process of which nobody can say how it has ended."""

SPAWN_S = 30.0
REAPED_S, REAP_LOOK_S = 2.0, 0.002
"""From the end of a process until its root has said how it ended, at most; and from one look to the next."""

HEEDED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGPIPE, signal.SIGTERM, signal.SIGXFSZ)
"""Signals that a child does not ignore: Python may, and whoever has started this program."""

_ABOVE_PASSED = 64  # copies on their way to a child are out of the way of those that are put in place before them
_SPAWNED = str(Path(__file__).with_name("spawned.py"))
EXIT = struct.Struct("=iiq")
"""What the root writes for each process that it has reaped: its pid, its status as `waitpid` has it, and when it began,
in clock ticks since boot."""


class Child:
    """A process: the leader of its own session and process group. Made by `Children`.

    Attributes:
        born_ticks: when it began, in clock ticks since boot: with the pid it is nobody else.
    """

    def __init__(self, pid: int, born_ticks: int) -> None:
        self.pid = pid
        self.born_ticks = born_ticks
        self._code: int | None = None
        self._ended = asyncio.Event()

    def poll(self) -> int | None:
        """Its exit code, or minus the signal that has ended it; None while it runs."""
        return self._code

    async def exited(self) -> int:
        """Wait for its end. The caller bounds the wait."""
        await self._ended.wait()
        assert self._code is not None, "that is what has been waited for"
        return self._code

    def end(self, code: int) -> None:
        """It has ended."""
        self._code = code
        self._ended.set()


class Children:
    """Starts, adopts and watches processes, in one event loop.

    Args:
        root: pid of the process whose children they are.
        exits: descriptor of the file in which that one says how they end; None where it is this process.
    """

    def __init__(self, root: int | None = None, exits: int | None = None) -> None:
        self.root = root or os.getpid()
        self._exits = exits
        self._watching: set[asyncio.Task[None]] = set()

    async def spawn(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        output: int,
        passed: Sequence[int] = (),
        noted: Callable[[Child], None] = lambda child: None,
    ) -> Child:
        """Start a program in a session of its own, with an empty stdin.

        Args:
            output: descriptor that becomes its stdout and stderr.
            passed: descriptors that it finds as 3, 4, 5 and so on.
            noted: told of the process before it goes on; what it raises ends it.

        Raises:
            OSError: the program is not there, or no process can be made.
        """
        if shutil.which(argv[0], path=env.get("PATH")) is None:
            raise FileNotFoundError(f"{argv[0]} is not there")
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with ours:
            with theirs:
                starter = self._start(argv, env, [output, *passed, theirs.fileno()])
            try:
                async with asyncio.timeout(SPAWN_S):
                    said = await asyncio.get_running_loop().sock_recv(ours, PID.size)
            except TimeoutError:
                raise OSError(f"{argv[0]} has not begun within {SPAWN_S:g} s") from None
            finally:
                _end_starter(starter)
            if len(said) < PID.size:
                raise OSError(f"no process can be made for {argv[0]}")
            return await self.begin(PID.unpack(said)[0], ours, noted)

    async def begin(self, pid: int, channel: socket.socket, noted: Callable[[Child], None]) -> Child:
        """Have a process go on that waits for the word on this channel, once it is noted.

        Raises:
            OSError: it has ended meanwhile.
        """
        child = self.adopt(pid)
        noted(child)
        await asyncio.get_running_loop().sock_sendall(channel, GO)
        return child

    def adopt(self, pid: int, born_ticks: int = 0) -> Child:
        """Watch a process of the root's. One that has ended before has an exit code at once, or within `REAPED_S`.

        Args:
            born_ticks: by which it is known; 0: whoever has this pid now.
        """
        found = processes.stat(pid)
        there = found is not None and born_ticks in (0, found.start_ticks)
        child = Child(pid, found.start_ticks if there and found is not None else born_ticks)
        runs = there and found is not None and not found.dead
        if not runs and (code := self._how(child)) is not None:
            child.end(code)
        elif there or (found is None and self._exits is not None):  # or it has just ended, and is about to be reaped
            watching = asyncio.get_running_loop().create_task(self._watch(child, _pidfd(pid) if there else None))
            self._watching.add(watching)
            watching.add_done_callback(self._watching.discard)
        else:
            child.end(UNKNOWN_EXIT)
        return child

    def _start(self, argv: Sequence[str], env: Mapping[str, str], given: Sequence[int]) -> int:
        """`given`: of the output, of what is passed, and of the channel."""
        copies = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, _ABOVE_PASSED) for one in given]
        output, *passed = copies
        channel = PASSED_FROM + len(passed) - 1
        try:
            return os.posix_spawn(
                sys.executable,
                (sys.executable, "-I", "-S", _SPAWNED, str(self.root), str(channel), *argv),
                env,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    *((os.POSIX_SPAWN_DUP2, output, standard) for standard in (1, 2)),
                    *((os.POSIX_SPAWN_DUP2, copy, PASSED_FROM + at) for at, copy in enumerate(passed)),
                ],
                setsigmask=(),
                setsigdef=HEEDED,
            )
        finally:
            for copy in copies:
                os.close(copy)

    async def _watch(self, child: Child, descriptor: int | None) -> None:
        """Until its end is known. `descriptor`: tells of it; None where it has ended."""
        if descriptor is not None:
            loop, gone = asyncio.get_running_loop(), asyncio.Event()
            loop.add_reader(descriptor, gone.set)
            try:
                await gone.wait()
            finally:
                loop.remove_reader(descriptor)
                os.close(descriptor)
        deadline = time.monotonic() + REAPED_S
        while (code := self._how(child)) is None and time.monotonic() < deadline:  # noqa: ASYNC110 - another process
            await asyncio.sleep(REAP_LOOK_S)
        child.end(UNKNOWN_EXIT if code is None else code)

    def _how(self, child: Child) -> int | None:
        """How it has ended, as far as that is known."""
        if self._exits is None:
            with contextlib.suppress(ChildProcessError):
                ended, status = os.waitpid(child.pid, os.WNOHANG)
                return os.waitstatus_to_exitcode(status) if ended else None
            return None
        said = os.pread(self._exits, os.fstat(self._exits).st_size, 0)
        whole = said[: len(said) // EXIT.size * EXIT.size]
        for pid, status, born_ticks in EXIT.iter_unpack(whole):
            if (pid, born_ticks) == (child.pid, child.born_ticks):
                return os.waitstatus_to_exitcode(status)
        return None


def be_root() -> None:
    """Have this process be the root of those that are started below it, which inherit what they are passed and no more.

    Raises:
        OSError: the kernel knows no such thing.
    """
    adopt_orphans()
    for one in os.listdir("/proc/self/fd"):  # Python opens none that is inherited: whoever has started us may have
        with contextlib.suppress(OSError):  # that of the listing
            if int(one) > 2:  # stdin, stdout and stderr are
                os.set_inheritable(int(one), False)


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def _end_starter(pid: int) -> None:
    """It has ended, or about to, or must: its fork is what was wanted."""
    with contextlib.suppress(ChildProcessError):
        if os.waitpid(pid, os.WNOHANG)[0] == 0:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
