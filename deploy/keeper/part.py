"""One part of a deployment: a fork of the keeper, made again when it ends. Its table of children outlives it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.host import event_loop
from deploy.host.processes import signal_process
from deploy.keeper.children import Children
from deploy.keeper.client import KeeperClient
from deploy.keeper.interface import Keeper
from deploy.keeper.messages import Answer, Event, encode
from epd_serve.lifeline import die_with_parent, name_process
from epd_serve.packets import packet_pair, send_packet

SETTLED_S = 10.0
"""A part that lived for so long is followed by another life at once."""

BACKOFF_S, BACKOFF_MAX_S = 0.1, 10.0
NEVER_READY = 3
"""So many lives of a part that has never been ready are enough."""


@dataclass(frozen=True)
class Part:
    """A part of the deployment.

    Attributes:
        main: what it does, in the event loop of a process of its own; returns an exit code.
        controls: it hears the signals, and says when all is over.
        vital: all ends where it never gets ready; else it is given up.
    """

    name: str
    main: Callable[[Keeper], Coroutine[Any, Any, int]]
    controls: bool = False
    vital: bool = True


@dataclass(frozen=True)
class Forked:
    """What a process is that has been forked for a part."""

    part: Part
    channel: socket.socket
    keeper_pid: int

    def be(self) -> None:
        """Does not return: whatever the keeper's callers have to undo is the keeper's to undo."""
        code = 1
        try:
            die_with_parent(self.keeper_pid)
            name_process(f"epd {self.part.name}")
            code = event_loop.run(self._main())
        finally:
            _flush()
            os._exit(code)

    async def _main(self) -> int:
        with KeeperClient(self.channel, self.keeper_pid) as keeper:
            try:
                return await self.part.main(keeper)
            except BaseException:  # to be shown now: a part that leaves its channel is killed
                traceback.print_exc()
                raise


class PartLives:
    """A part, in the keeper.

    Attributes:
        children: what it has had started, in whichever life.
        channel: to the life of now. pid: of that one; None between two lives. restarts: lives before it.
        due: monotonic, when the next one is forked.
        was_ready: some life of it was.
    """

    def __init__(self, part: Part) -> None:
        self.part = part
        self.children = Children()
        self.channel: socket.socket | None = None
        self.pid: int | None = None
        self.restarts = -1
        self.due = 0.0
        self.was_ready = False
        self._failures = 0
        self._begun = 0.0

    @property
    def hopeless(self) -> bool:
        return not self.was_ready and self._failures >= NEVER_READY

    @property
    def awaited(self) -> bool:
        """Between two lives."""
        return self.pid is None and not self.hopeless

    def fork(self) -> Forked | None:
        """Begin a life. In the new process: what it is. There signals have no handlers, and nobody's terminal is its
        own; the keeper's descriptors are still to be closed.

        Raises:
            OSError: there is no room for a process.
        """
        keeper_pid = os.getpid()
        self._begun = time.monotonic()
        ours, theirs = packet_pair()
        ours.setblocking(False)
        _flush()
        # A signal that reaches the fork before it has left the keeper's handlers would be read here as the keeper's.
        masked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
                    if callable(signal.getsignal(number)):
                        signal.signal(number, signal.SIG_DFL)
                os.setsid()  # Ctrl-C in the terminal is the keeper's to hear
                ours.close()
                return Forked(self.part, theirs, keeper_pid)
        except OSError:
            ours.close()
            theirs.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        theirs.close()
        self.pid, self.channel = pid, ours
        self.restarts += 1
        return None

    def tell(self, message: Answer | Event, descriptors: Sequence[int] = ()) -> None:
        """To the life of now, if there is one.

        Raises:
            OSError: it does not read.
        """
        if self.channel is not None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it is about to be collected
                send_packet(self.channel, encode(message), descriptors)

    def kill(self) -> None:
        if self.pid is not None:
            signal_process(self.pid, signal.SIGKILL)

    def ended(self) -> float:
        """The life of now has ended, or could not begin. Returns in how many seconds the next one does."""
        self.close()
        self.pid, now = None, time.monotonic()
        settled = self.was_ready and now - self._begun >= SETTLED_S
        self._failures = 1 if settled else self._failures + 1
        delay_s = 0.0 if self._failures == 1 else min(BACKOFF_MAX_S, BACKOFF_S * 2.0 ** min(self._failures - 2, 16))
        self.due = now + delay_s
        return delay_s

    def close(self) -> None:
        """Its channel."""
        if self.channel is not None:
            self.channel.close()
            self.channel = None


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or its reader has gone
            stream.flush()
