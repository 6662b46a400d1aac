"""The process that a deployment is: parent of all its processes. It forks the one that controls it.

That one (`control`) is a fork of this process, made again when it dies: what was prepared before, such as listening
sockets, is simply there in each life. All others are orphans that come here (`children.py`), so that they outlive it;
they die with this process, for each has asked the kernel for that. It decides nothing, has one thread and no event
loop, and imports nothing from then on, so there is nothing that could break in it, nor be in the wrong state when it
forks.

Control that has come to its end says so by its exit code (`OVER`); one that ends in any other way is followed by
another. It hears the operator's signals from a pipe, those that came before it was there first. What has to outlive it
lies in files in memory that each life inherits: its state, and how each process ended.

    serving --control says that it is over--> everything that is left is killed
    serving --a signal, and no such word in time; control never gets ready; `look` says so--> the same
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, BinaryIO, NoReturn, TypeVar

from deploy.host import event_loop
from deploy.host.children import EXIT, Children, be_root
from deploy.host.processes import signal_process, stat
from deploy.host.state import SharedState, StateFiles
from epd_serve.garbage import freeze_gc
from epd_serve.lifeline import die_with_parent, name_process

T = TypeVar("T")

CONTROL = "control"
KILLED = 130
"""Exit code after the signal that allows of no more waiting."""

OVER, CODES, CRASHED = 100, (0, 1, KILLED), 70
"""Control exits with `OVER` and the deployment's code, one of `CODES`: none that Python has for reasons of its own."""

SETTLED_S = 10.0
"""Control that lived for so long is followed by another at once."""

BACKOFF_S, BACKOFF_MAX_S = 0.1, 10.0
NEVER_READY = 3
"""So many lives of a control that has never been ready are enough."""

QUICK_S = 15.0
"""From SIGINT or SIGHUP until control is waited for no longer; `QUICKER_S` from the second one."""

QUICKER_S = 2.0
BEYOND_DRAIN_S = 30.0
KILL_TIMEOUT_S = 5.0
LOOK_S = 0.25

_TO_END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_HEARD = (*_TO_END, signal.SIGCHLD)


@dataclass(frozen=True)
class Life:
    """What one life of control is born with.

    Attributes:
        root: pid of the process whose children all are.
        restarts: lives before it.
        signals: descriptor of the pipe in which the operator's signals come, a byte each.
        exits: as of `Children`. state: what the lives before it have written down.
    """

    root: int
    restarts: int
    signals: int
    exits: int
    state: SharedState

    def children(self) -> Children:
        return Children(self.root, self.exits)

    def heed(self, take: Callable[[int], None]) -> None:
        """Have every signal of the operator taken from now on, those before this life first. In the event loop."""

        def hear() -> None:
            for number in os.read(self.signals, 4096):
                take(number)

        asyncio.get_running_loop().add_reader(self.signals, hear)


Control = Callable[[Life], Coroutine[Any, Any, int]]


async def crash_only(work: Coroutine[Any, Any, T]) -> T:
    """Its outcome. An error ends this process at once, and not by unwinding: that would end what another life of it is
    to go on with."""
    try:
        return await work
    except BaseException:  # noqa: BLE001 - whatever it is
        traceback.print_exc()
        _flush()
        os._exit(CRASHED)


def end_now(code: int) -> NoReturn:
    """The deployment is over, and what is left of it is to be killed. In control."""
    assert code in CODES
    _flush()
    os._exit(OVER + code)


@dataclass
class Root:
    """Keeps control alive until all is over, and collects every child of this process meanwhile.

    Attributes:
        control: what it does, in the event loop of a process of its own; returns the exit code of the deployment.
        drain_s: how long requests may go on after SIGTERM: from then on control has `BEYOND_DRAIN_S` more.
        say: takes a line for the operator; what it raises of OSError is ignored.
        was_ready: whether any life of control has been ready, by the sections of its state.
        take_down: ends what control had started, when it does not run any more. No signal interrupts it.
        owned: files that control is not to have.
        look: called every `LOOK_S` seconds with the sections of the state; says why all has to end, or "".
    """

    control: Control
    _: KW_ONLY
    drain_s: float
    say: Callable[[str], None]
    was_ready: Callable[[Mapping[str, bytes]], bool]
    take_down: Callable[[], None] = lambda: None
    owned: Sequence[BinaryIO] = ()
    look: Callable[[Mapping[str, bytes]], str] | None = None

    def __post_init__(self) -> None:
        self.root = os.getpid()
        be_root()
        self.exits = os.memfd_create("exits", os.MFD_CLOEXEC)
        self.state = StateFiles.make()
        self.code: int | None = None  # to exit with, once it is over
        self.pid: int | None = None  # of control; None between two lives
        self.due = 0.0  # monotonic, when the next one is forked
        self.told = bytearray()  # signals that have come
        self.tell = -1  # descriptor of the pipe to control
        self.restarts = -1
        self.failures = 0
        self.begun = 0.0
        self.deadline = float("inf")

    def serve(self) -> int:
        """When it returns control does not run any more, and signals are blocked: one that comes late, or again, must
        not end this process by another code than the one that is returned.

        Returns:
            The exit code that control has ended with, or ours where it has not.
        """
        freeze_gc()  # a collection in control would write to, and so copy, all that it has in common with this process
        signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # whoever has started us may have ignored it
        while self.code is None:
            if self.pid is None and time.monotonic() >= self.due:
                self._fork()
            heard = signal.sigtimedwait(_HEARD, self._wait_s())
            if heard is not None and heard.si_signo in _TO_END:
                self._on_signal(heard.si_signo)
            self._reap()
            if time.monotonic() >= self.deadline:
                self._end(KILLED, "nobody has ended it in time: everything is killed")
            if self.look is not None and (why := self.look(self.state.sections())):
                self._end(1, why)
        self._end_control()
        self.take_down()
        return self.code

    def _wait_s(self) -> float:
        """How long nothing is to be done, if nobody says anything; an hour is as good as for ever."""
        soonest = min(self.deadline, self.due if self.pid is None else float("inf"))
        return min(3600.0 if self.look is None else LOOK_S, max(0.0, soonest - time.monotonic()))

    def _on_signal(self, number: int) -> None:
        self.told.append(number)
        self.deadline = min(self.deadline, time.monotonic() + self._patience_s(number))
        self.due = 0.0
        if self.pid is not None:
            with contextlib.suppress(OSError):  # it has gone, or has not listened to a whole pipe of them
                os.write(self.tell, bytes([number]))

    def _patience_s(self, number: int) -> float:
        if number == signal.SIGTERM:
            return self.drain_s + BEYOND_DRAIN_S
        quick = sum(one != signal.SIGTERM for one in self.told)
        return QUICK_S if quick == 1 else QUICKER_S if quick == 2 else 0.0

    def _end(self, code: int, why: str = "") -> None:
        """The first word counts."""
        if self.code is None:
            self.code = code
            self._say(why)

    # --- control --------------------------------------------------------------------------------------------------

    def _fork(self) -> None:
        """Does not return in the new process."""
        self.begun = time.monotonic()
        _flush()
        heard, tell = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.write(tell, self.told)
        try:
            pid = os.fork()
        except OSError as error:
            os.close(tell)
            self._ended(f"cannot be forked: {error}")
            return
        finally:
            if os.getpid() == self.root:
                os.close(heard)
        if pid == 0:
            os.close(tell)
            self._be_control(heard)
        self.pid, self.tell = pid, tell
        self.restarts += 1

    def _be_control(self, heard: int) -> NoReturn:
        """Whatever the callers of `serve` have to undo is the root's to undo."""
        code = CRASHED
        try:
            os.setsid()  # Ctrl-C in the terminal is the root's to hear, also one that has just been heard here
            for number in _TO_END:
                signal.signal(number, signal.SIG_IGN)
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)
            die_with_parent(self.root)
            name_process(f"epd {CONTROL}")
            for file in self.owned:
                file.close()
            life = Life(self.root, self.restarts + 1, heard, self.exits, SharedState(self.state))
            code = OVER + event_loop.run(crash_only(self.control(life)))
        except BaseException:  # noqa: BLE001 - whatever it is
            traceback.print_exc()
        finally:
            _flush()
            os._exit(code)

    def _ended(self, how: str) -> None:
        settled = time.monotonic() - self.begun >= SETTLED_S
        self._is_gone()
        self.failures = 1 if settled else self.failures + 1
        if self.failures >= NEVER_READY and not self.was_ready(self.state.sections()):
            self._end(1, f"{CONTROL} ends again and again and was never ready")
            return
        delay_s = 0.0 if self.failures == 1 else min(BACKOFF_MAX_S, BACKOFF_S * 2.0 ** min(self.failures - 2, 16))
        self.due = time.monotonic() + delay_s
        self._say(f"{CONTROL} {how}; another one starts in {delay_s:.1f} s")

    def _end_control(self) -> None:
        if self.pid is None:
            return
        signal_process(self.pid, signal.SIGKILL)
        until = time.monotonic() + KILL_TIMEOUT_S
        while self.pid is not None and time.monotonic() < until:
            self._reap()
            time.sleep(0.001)

    # --- all others -----------------------------------------------------------------------------------------------

    def _reap(self) -> None:
        """Those that have ended. How, is written down for control, which is nobody's parent."""
        while (pid := _ended_child()) is not None:
            found = stat(pid)
            _, status = os.waitpid(pid, 0)
            if pid != self.pid:
                os.write(self.exits, EXIT.pack(pid, status, found.start_ticks if found is not None else 0))
            elif self.code is not None:
                self._is_gone()
            elif (code := os.waitstatus_to_exitcode(status) - OVER) in CODES:
                self._is_gone()
                self._end(code)
            else:
                self._ended(_how(code + OVER))

    def _is_gone(self) -> None:
        if self.pid is not None:
            os.close(self.tell)
        self.pid = None

    def _say(self, line: str) -> None:
        if line:
            with contextlib.suppress(OSError):  # the terminal has gone
                self.say(line)


def _ended_child() -> int | None:
    """Pid of a child that has ended and is still to be waited for, if there is one."""
    with contextlib.suppress(ChildProcessError):
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return found.si_pid if found is not None else None
    return None


def _how(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"has failed (exit code {code})"


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or its reader has gone
            stream.flush()
