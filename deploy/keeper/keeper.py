"""The process that a deployment is: parent of all its processes, which forks its parts and decides nothing.

A part (controller, agent) is a fork of this process, made again when it ends: what was prepared before `keep`, such as
listening sockets, is simply there in each life. The keeper has one thread and no event loop, and imports nothing from
then on, so there is nothing that could break in it, nor be in the wrong state when it forks. What parts ask of it
(`messages.py`) is done on a table of theirs, which outlives them.

    serving --the controller says that it is over--> everything that is left is killed
    serving --a signal, and no such word in time; a part that never gets ready--> the same
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from deploy.host import event_loop
from deploy.keeper import messages
from deploy.keeper.children import Children
from deploy.keeper.client import Keeper, KeeperClient
from deploy.keeper.messages import Answer, Event, Request, decode_request, encode
from epd_serve.lifeline import die_with_parent, name_process
from epd_serve.packets import close_all, packet_pair, receive_packet, send_packet

SETTLED_S = 10.0
"""A part that lived for so long is followed by another life at once."""

BACKOFF_S, BACKOFF_MAX_S = 0.1, 10.0
NEVER_READY = 3
"""So many lives of a part that has never been ready are enough."""

QUICK_S = 15.0
"""From SIGINT or SIGHUP until the keeper waits for the controller no longer; `QUICKER_S` from the second one."""

QUICKER_S = 2.0
BEYOND_DRAIN_S = 30.0
KILL_TIMEOUT_S = 5.0
KILLED = 130
"""Exit code after the signal that allows of no more waiting."""

_TO_END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_HEARD = (*_TO_END, signal.SIGCHLD)


@dataclass(frozen=True)
class Part:
    """A part of the deployment.

    Attributes:
        main: what it does, in the event loop of a process of its own; returns an exit code.
        controls: it hears the signals, and says when all is over.
    """

    name: str
    main: Callable[[Keeper], Coroutine[Any, Any, int]]
    controls: bool = False


def keep(
    parts: Sequence[Part],
    *,
    drain_s: float,
    say: Callable[[str], None],
    owned: Sequence[BinaryIO] = (),
) -> int:
    """Keep the parts alive until all is over, and collect every child of this process meanwhile.

    When it returns no part runs any more; what they had started may. This process's handlers of signals are its own
    again.

    Args:
        drain_s: how long requests may go on after SIGTERM: from then on the controller has `BEYOND_DRAIN_S` more.
        say: takes a line for the operator; what it raises of OSError is ignored.
        owned: files that no part is to have.

    Returns:
        The exit code that the controller has said, or ours where it has not.
    """
    keeper = _Keeping(parts, drain_s, say, owned)
    part = keeper.serve()
    if part is not None:
        _be(part)
    return keeper.code


@dataclass
class _Kept:
    """A part, and what outlives its lives.

    Attributes:
        channel: to the life of now. pid: of that one; None between two lives.
        due: monotonic, when the next one is forked.
        was_ready: some life of it was.
    """

    part: Part
    children: Children = field(default_factory=Children)
    channel: socket.socket | None = None
    pid: int | None = None
    lives: int = 0
    failures: int = 0
    begun: float = 0.0
    due: float = 0.0
    was_ready: bool = False


@dataclass(frozen=True)
class _Forked:
    """What is in a process that has been forked for a part."""

    part: Part
    channel: socket.socket
    keeper_pid: int


class _Keeping:
    """The loop.

    Attributes:
        code: what to exit with, once it is over.
    """

    def __init__(
        self, parts: Sequence[Part], drain_s: float, say: Callable[[str], None], owned: Sequence[BinaryIO]
    ) -> None:
        self.code = 1
        self._pid = os.getpid()
        self._parts = [_Kept(part) for part in parts]
        self._drain_s = drain_s
        self._say_line = say
        self._owned = owned
        self._over = False
        self._told: list[int] = []
        self._deadline = float("inf")
        self._selector = selectors.PollSelector()  # no descriptor of its own, which a fork would share

    def serve(self) -> _Forked | None:
        """Until it is over: None. In a process that was forked for a part it returns that part."""
        woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        before = {number: signal.signal(number, _heard) for number in _HEARD}
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._selector.register(woken, selectors.EVENT_READ)
        self._own = [woken, wake]
        while not self._over:
            if (forked := self._fork_due()) is not None:
                return forked
            ready = self._selector.select(self._wait_s())
            if any(key.fd == woken for key, _ in ready):
                self._on_signals(_numbers(woken))
            self._collect()  # first: what a part that has gone had asked for is not done any more
            for key, _ in ready:
                kept = key.data
                if isinstance(kept, _Kept) and kept.channel is not None and not self._over:
                    self._on_request(kept, kept.channel)
            self._judge()
        self._end_parts()
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(woken)
        os.close(wake)
        return None

    # --- signals and deadlines ------------------------------------------------------------------------------------

    def _on_signals(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if number not in _TO_END:
                continue
            self._told.append(number)
            self._deadline = min(self._deadline, time.monotonic() + self._patience_s(number))
            for kept in self._parts:
                kept.due = 0.0
                if kept.part.controls:
                    self._tell(kept, messages.Signalled(number))

    def _patience_s(self, number: int) -> float:
        if number == signal.SIGTERM:
            return self._drain_s + BEYOND_DRAIN_S
        quick = sum(one != signal.SIGTERM for one in self._told)
        return QUICK_S if quick == 1 else QUICKER_S if quick == 2 else 0.0

    def _wait_s(self) -> float | None:
        """How long nothing is to be done, if nobody says anything."""
        due = [kept.due for kept in self._parts if kept.pid is None]
        soonest = min([self._deadline, *due])
        return None if soonest == float("inf") else max(0.0, soonest - time.monotonic())

    def _judge(self) -> None:
        """End it where nobody else does."""
        if self._over:
            return
        if time.monotonic() >= self._deadline:
            self._end(KILLED, "the controller has not ended in time: everything is killed")
        for kept in self._parts:
            if not kept.was_ready and kept.failures >= NEVER_READY:
                self._end(1, f"the {kept.part.name} has ended {kept.failures} times and was never ready")

    def _end(self, code: int, why: str = "") -> None:
        self._over, self.code = True, code
        if why:
            self._say(why)

    # --- parts ----------------------------------------------------------------------------------------------------

    def _fork_due(self) -> _Forked | None:
        for kept in self._parts:
            if kept.pid is None and time.monotonic() >= kept.due:
                try:
                    forked = self._fork(kept)
                except OSError as error:
                    kept.begun = time.monotonic()
                    self._failed(kept, f"cannot be forked: {error}")
                    continue
                if forked is not None:
                    return forked
                for number in self._told if kept.part.controls else ():
                    self._tell(kept, messages.Signalled(number))
        return None

    def _fork(self, kept: _Kept) -> _Forked | None:
        """In the new process: what it is. It has nothing of the keeper's but the other end of its channel."""
        ours, theirs = packet_pair()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        # A signal that reaches the fork before it has left the keeper's handlers would be read here as the keeper's.
        masked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            kept.pid = os.fork()
            if kept.pid == 0:
                signal.set_wakeup_fd(-1)
                for number in _HEARD:
                    signal.signal(number, signal.SIG_DFL)
                os.setsid()  # Ctrl-C in the terminal is the keeper's to hear
                ours.close()
                self._close_own()
                return _Forked(kept.part, theirs, self._pid)
        except OSError:
            kept.pid = None
            ours.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, masked)
            if kept.pid != 0:
                theirs.close()
        ours.setblocking(False)
        kept.channel, kept.begun, kept.lives = ours, time.monotonic(), kept.lives + 1
        self._selector.register(ours, selectors.EVENT_READ, kept)
        return None

    def _close_own(self) -> None:
        self._selector.close()
        close_all(self._own)
        for file in self._owned:
            file.close()
        for kept in self._parts:
            kept.children.close()
            if kept.channel is not None:
                kept.channel.close()

    def _collect(self) -> None:
        """Wait for those that have ended, orphans that nobody has adopted among them."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for kept in self._parts:
                if kept.pid == pid:
                    self._part_ended(kept, os.waitstatus_to_exitcode(status))
                elif (ended := kept.children.ended(pid, status)) is not None:
                    self._tell(kept, messages.Exited(ended.name, ended.pid, ended.code))

    def _part_ended(self, kept: _Kept, code: int) -> None:
        assert kept.channel is not None, "it had one as long as it ran"
        self._selector.unregister(kept.channel)
        kept.channel.close()
        kept.channel = kept.pid = None
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"has ended with exit code {code}"
        self._failed(kept, how)

    def _failed(self, kept: _Kept, how: str) -> None:
        now = time.monotonic()
        kept.failures = 1 if kept.was_ready and now - kept.begun >= SETTLED_S else kept.failures + 1
        delay_s = 0.0 if kept.failures == 1 else min(BACKOFF_MAX_S, BACKOFF_S * 2.0 ** min(kept.failures - 2, 16))
        kept.due = now + delay_s
        if kept.was_ready or kept.failures < NEVER_READY:
            self._say(f"the {kept.part.name} {how}; another one starts in {delay_s:.1f} s")

    def _end_parts(self) -> None:
        """Nothing is asked for any more, nor is any part forked."""
        for kept in self._parts:
            if kept.pid is not None:
                os.kill(kept.pid, signal.SIGKILL)
        until = time.monotonic() + KILL_TIMEOUT_S
        while any(kept.pid is not None and _runs(kept.pid) for kept in self._parts) and time.monotonic() < until:
            time.sleep(0.001)
        for kept in self._parts:
            if kept.channel is not None:
                kept.channel.close()
            kept.children.close()
        self._selector.close()

    # --- what they ask --------------------------------------------------------------------------------------------

    def _on_request(self, kept: _Kept, channel: socket.socket) -> None:
        try:
            message, descriptors = receive_packet(channel)
        except BlockingIOError:
            return
        except EOFError:  # it is about to end, or cannot be heard any more
            assert kept.pid is not None, "it has a channel"
            os.kill(kept.pid, signal.SIGKILL)
            return
        except OSError as error:  # no room for its descriptors
            self._tell(kept, messages.Refused.of(error))
            return
        try:
            answer, stored = self._carry_out(kept, decode_request(message), descriptors)
        except (OSError, ValueError) as error:
            answer, stored = messages.Refused.of(error), []
        finally:
            close_all(descriptors)
        self._tell(kept, answer, stored)

    def _carry_out(self, kept: _Kept, request: Request, given: Sequence[int]) -> tuple[Answer, list[int]]:
        """The answer, and the descriptors that go with it. Raises OSError or ValueError where it cannot be."""
        children = kept.children
        match request:
            case messages.Spawn(name, argv, env, record):
                output, *passed = given
                started = children.spawn(name, argv, env, output=output, passed=passed, tag=record)
                assert started.pid is not None, "it has just begun"
                return messages.Done(started.pid), []
            case messages.Adopt(name, pid, record):
                if any(pid == other.pid or other.children.runs(pid) for other in self._parts):
                    raise ValueError(f"process {pid} has a name already")
                children.adopt(name, pid, tag=record)
                return messages.Done(pid), []
            case messages.Note(name, record):
                children.note(name, record, *given)
            case messages.Forget(name):
                children.forget(name)
            case messages.List():
                return self._list(children)
            case messages.Ready():
                kept.was_ready = True
            case messages.Over(code):
                if not kept.part.controls:
                    raise ValueError(f"the {kept.part.name} does not say what is over")
                self._end(code)
        return messages.Done(), []

    def _list(self, children: Children) -> tuple[Answer, list[int]]:
        kept = list(children.kept.values())
        rows = [messages.Row(one.name, one.tag, one.pid, one.code, one.descriptor is not None) for one in kept]
        parts = [messages.PartRow(one.part.name, one.pid, one.lives - 1) for one in self._parts]
        return messages.Listed(rows, parts), [one.descriptor for one in kept if one.descriptor is not None]

    def _tell(self, kept: _Kept, message: Answer | Event, descriptors: Sequence[int] = ()) -> None:
        """A part that does not listen is ended: the next one will."""
        if kept.channel is None or kept.pid is None:
            return
        try:
            send_packet(kept.channel, encode(message), descriptors)
        except (BrokenPipeError, ConnectionResetError):  # it is about to be collected
            return
        except OSError as error:
            self._say(f"the {kept.part.name} does not listen ({error}) and is killed")
            os.kill(kept.pid, signal.SIGKILL)

    def _say(self, line: str) -> None:
        with contextlib.suppress(OSError):  # the terminal has gone
            self._say_line(line)


def _be(forked: _Forked) -> None:
    """Be the part. Does not return: whatever the keeper's callers have to undo is the keeper's."""
    code = 1
    try:
        die_with_parent(forked.keeper_pid)
        name_process(f"epd {forked.part.name}")
        code = event_loop.run(_main(forked))
    except BaseException:  # noqa: BLE001 - to be shown, and no more: there is no caller
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


async def _main(forked: _Forked) -> int:
    with KeeperClient(forked.channel, forked.keeper_pid) as keeper:
        return await forked.part.main(keeper)


def _runs(pid: int) -> bool:
    """Whether a child does; one that does not is collected."""
    try:
        return os.waitpid(pid, os.WNOHANG) == (0, 0)
    except ChildProcessError:
        return False


def _heard(number: int, frame: object) -> None:
    """A handler there must be; the descriptor wakes the loop, and says which signals came."""


def _numbers(woken: int) -> list[int]:
    with contextlib.suppress(BlockingIOError):
        return list(os.read(woken, 4096))
    return []
