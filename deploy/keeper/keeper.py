"""The process that a deployment is: parent of all its processes, which forks its parts and decides nothing.

A part (controller, agent) is a fork of this process, made again when it ends: what was prepared before `keep`, such as
listening sockets, is simply there in each life. The keeper has one thread and no event loop, and imports nothing from
then on, so there is nothing that could break in it, nor be in the wrong state when it forks. What parts ask of it
(`messages.py`) is done on a table of theirs, which outlives them.

    serving --the controller says that it is over--> everything that is left is killed
    serving --a signal, and no such word in time; a part that never gets ready; the owner has gone--> the same
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import BinaryIO

from deploy.keeper import messages
from deploy.keeper.children import Children
from deploy.keeper.messages import Answer, Event, Request, decode_request
from deploy.keeper.part import Forked, Part, PartLives
from epd_serve.packets import close_all, receive_packet

QUICK_S = 15.0
"""From SIGINT or SIGHUP until the keeper waits for the controller no longer; `QUICKER_S` from the second one."""

QUICKER_S = 2.0
BEYOND_DRAIN_S = 30.0
KILL_TIMEOUT_S = 5.0
KILLED = 130
"""Exit code after the signal that allows of no more waiting."""

_TO_END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_HEARD = (*_TO_END, signal.SIGCHLD)


def keep(
    parts: Sequence[Part],
    *,
    drain_s: float,
    say: Callable[[str], None],
    take_down: Callable[[], None] = lambda: None,
    owned: Sequence[BinaryIO] = (),
    owner: int | None = None,
    begun: Callable[[Sequence[str]], None] = lambda given_up: None,
    begin_s: float = float("inf"),
) -> int:
    """Keep the parts alive until all is over, and collect every child of this process meanwhile.

    When it returns no part runs any more, and the signals that have been heard until then are ignored: one that comes
    late, or again, must not end this process by another code than the one that is returned.

    Args:
        drain_s: how long requests may go on after SIGTERM: from then on the controller has `BEYOND_DRAIN_S` more.
        say: takes a line for the operator; what it raises of OSError is ignored.
        take_down: ends what the parts had started, when no part runs any more. No signal interrupts it.
        owned: files that no part is to have.
        owner: descriptor of a process, of `os.pidfd_open`: with its end all ends at once. No part has it.
        begun: called once, when every part is ready or has been given up, with the names of the latter. What it raises
            of OSError ends all.
        begin_s: how long that may take.

    Returns:
        The exit code that the controller has said, or ours where it has not.
    """
    keeping = _Keeping(parts, drain_s, say, owned, owner, begun, begin_s)
    forked = keeping.serve(take_down)
    if forked is not None:
        forked.be()
    return keeping.code


class _Keeping:
    """The loop.

    Attributes:
        code: what to exit with, once it is over.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        drain_s: float,
        say: Callable[[str], None],
        owned: Sequence[BinaryIO],
        owner: int | None,
        begun: Callable[[Sequence[str]], None],
        begin_s: float,
    ) -> None:
        self.code = 1
        self._parts = [PartLives(part) for part in parts]
        self._drain_s = drain_s
        self._say_line = say
        self._owned = owned
        self._owner = owner
        self._begun = begun
        self._begin_by: float | None = time.monotonic() + begin_s  # None: it has begun
        self._over = False
        self._told: list[int] = []
        self._deadline = float("inf")
        self._selector = selectors.PollSelector()  # no descriptor of its own, which a fork would share

    def serve(self, take_down: Callable[[], None]) -> Forked | None:
        """Until it is over: None. In a process that was forked for a part it returns that."""
        woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for number in _HEARD:
            signal.signal(number, _heard)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._selector.register(woken, selectors.EVENT_READ)
        if self._owner is not None:
            self._selector.register(self._owner, selectors.EVENT_READ)
        try:
            while not self._over:
                for lives in self._due():
                    if (forked := self._fork(lives)) is not None:
                        return forked
                self._serve_once(woken)
            self._end_parts()
            take_down()
            signal.set_wakeup_fd(-1)
            for number in _TO_END:  # Python's exit gives a function's signal back to the kernel, which would kill us
                signal.signal(number, signal.SIG_IGN)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return None
        finally:  # in either process
            close_all((woken, wake))
            for lives in self._parts:
                lives.close()
                lives.children.close()

    def _serve_once(self, woken: int) -> None:
        """Wait, and do what is to be done then."""
        ready = self._selector.select(self._wait_s())
        if any(key.fd == woken for key, _ in ready):
            self._on_signals(_numbers(woken))
        self._collect()  # first: what a part that has gone had asked for is not done any more
        for key, _ in ready:
            lives = key.data
            if isinstance(lives, PartLives) and lives.channel is not None and not self._over:
                self._on_request(lives, lives.channel)
        if any(key.fd == self._owner for key, _ in ready):
            self._end(KILLED, "whom it belongs to has gone: everything is killed")
        if time.monotonic() >= self._deadline:
            self._end(KILLED, "nobody has ended it in time: everything is killed")
        if self._begin_by is not None and not self._over:
            self._look_whether_begun(self._begin_by)

    def _look_whether_begun(self, by: float) -> None:
        late = [one.part.name for one in self._parts if not (one.was_ready or one.hopeless)]
        if late and time.monotonic() >= by:
            self._end(1, f"the {late[0]} is not ready in time")
        if late:
            return
        self._begin_by = None
        try:
            self._begun([one.part.name for one in self._parts if one.hopeless])
        except OSError as error:
            self._end(1, f"nobody hears that it has begun: {error}")

    def _end(self, code: int, why: str = "") -> None:
        """The first word counts."""
        if not self._over:
            self._over, self.code = True, code
            self._say(why)

    # --- signals and deadlines ------------------------------------------------------------------------------------

    def _on_signals(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if number in _TO_END:
                self._told.append(number)
                self._deadline = min(self._deadline, time.monotonic() + self._patience_s(number))
                for lives in self._parts:
                    lives.due = 0.0
                    if lives.part.controls:
                        self._tell(lives, messages.Signalled(number))

    def _patience_s(self, number: int) -> float:
        if number == signal.SIGTERM:
            return self._drain_s + BEYOND_DRAIN_S
        quick = sum(one != signal.SIGTERM for one in self._told)
        return QUICK_S if quick == 1 else QUICKER_S if quick == 2 else 0.0

    def _wait_s(self) -> float | None:
        """How long nothing is to be done, if nobody says anything."""
        dues = (lives.due for lives in self._parts if lives.awaited)
        soonest = min([self._deadline, *dues, *([] if self._begin_by is None else [self._begin_by])])
        return None if soonest == float("inf") else max(0.0, soonest - time.monotonic())

    # --- parts ----------------------------------------------------------------------------------------------------

    def _due(self) -> list[PartLives]:
        return [lives for lives in self._parts if lives.awaited and time.monotonic() >= lives.due]

    def _fork(self, lives: PartLives) -> Forked | None:
        """In the new process: what it is, with nothing of the keeper's but the other end of its channel."""
        try:
            forked = lives.fork()
        except OSError as error:
            self._part_ended(lives, f"cannot be forked: {error}")
            return None
        if forked is not None:
            for file in self._owned:
                file.close()
            if self._owner is not None:
                os.close(self._owner)
            return forked
        assert lives.channel is not None, "it has just begun"
        self._selector.register(lives.channel, selectors.EVENT_READ, lives)
        for number in self._told if lives.part.controls else ():
            self._tell(lives, messages.Signalled(number))
        return None

    def _part_ended(self, lives: PartLives, how: str) -> None:
        if lives.channel is not None:
            self._selector.unregister(lives.channel)
        delay_s, name = lives.ended(), lives.part.name
        if not lives.hopeless:
            self._say(f"the {name} {how}; another one starts in {delay_s:.1f} s")
        elif lives.part.vital:
            self._end(1, f"the {name} ends again and again and was never ready")
        else:
            self._say(f"the {name} {how}, again and again, and was never ready: it is given up")

    def _collect(self) -> None:
        """Wait for those that have ended, orphans that nobody has adopted among them."""
        while (found := _ended_child()) is not None:
            pid, status = found
            for lives in self._parts:
                if lives.pid == pid:
                    self._part_ended(lives, _how(os.waitstatus_to_exitcode(status)))
                elif (ended := lives.children.ended(pid, status)) is not None:
                    self._tell(lives, messages.Exited(ended.name, ended.pid, ended.code))

    def _end_parts(self) -> None:
        """Nothing is asked for any more, nor is any part forked."""
        left = {lives.pid for lives in self._parts if lives.pid is not None}
        for lives in self._parts:
            lives.kill()
        until = time.monotonic() + KILL_TIMEOUT_S
        while left and time.monotonic() < until:
            if (found := _ended_child()) is None:
                time.sleep(0.001)
            else:
                left.discard(found[0])

    # --- what they ask --------------------------------------------------------------------------------------------

    def _on_request(self, lives: PartLives, channel: socket.socket) -> None:
        try:
            message, descriptors = receive_packet(channel)
        except BlockingIOError:
            return
        except EOFError:  # it is about to end, or cannot be heard any more
            lives.kill()
            return
        except OSError as error:  # no room for its descriptors
            self._tell(lives, messages.Refused.of(error))
            return
        try:
            answer, stored = self._carry_out(lives, decode_request(message), descriptors)
        except (OSError, ValueError) as error:
            answer, stored = messages.Refused.of(error), []
        finally:
            close_all(descriptors)
        self._tell(lives, answer, stored)

    def _carry_out(self, lives: PartLives, request: Request, given: Sequence[int]) -> tuple[Answer, list[int]]:
        """The answer, and the descriptors that go with it. Raises OSError or ValueError where it cannot be."""
        children = lives.children
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
                lives.was_ready = True
            case messages.Over(code):
                if not lives.part.controls:
                    raise ValueError(f"the {lives.part.name} does not say what is over")
                self._end(code)
        return messages.Done(), []

    def _list(self, children: Children) -> tuple[Answer, list[int]]:
        kept = list(children.kept.values())
        rows = [messages.Row(one.name, one.tag, one.pid, one.code, one.descriptor is not None) for one in kept]
        parts = [messages.PartRow(one.part.name, one.pid, one.restarts) for one in self._parts]
        return messages.Listed(rows, parts), [one.descriptor for one in kept if one.descriptor is not None]

    def _tell(self, lives: PartLives, message: Answer | Event, descriptors: Sequence[int] = ()) -> None:
        """A part that does not listen is ended: the next one will."""
        try:
            lives.tell(message, descriptors)
        except OSError as error:
            self._say(f"the {lives.part.name} does not listen ({error}) and is killed")
            lives.kill()

    def _say(self, line: str) -> None:
        if line:
            with contextlib.suppress(OSError):  # the terminal has gone
                self._say_line(line)


def _ended_child() -> tuple[int, int] | None:
    """Pid and status of a child that has ended, if there is one."""
    with contextlib.suppress(ChildProcessError):
        found = os.waitpid(-1, os.WNOHANG)
        return found if found[0] else None
    return None


def _how(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"has ended with exit code {code}"


def _heard(number: int, frame: object) -> None:
    """A handler there must be; the descriptor wakes the loop, and says which signals came."""


def _numbers(woken: int) -> list[int]:
    with contextlib.suppress(BlockingIOError):
        return list(os.read(woken, 4096))
    return []
