"""What signals ask of a process that serves: SIGTERM to drain, SIGINT and SIGHUP to end at once, the next one more.

    serving --SIGTERM--> draining --any signal, or drained--> stopping --any signal--> killed
    serving --SIGINT, SIGHUP--> stopping

Owns the order of these, and the wait for the requests in flight. Leaves to each command what stopping means.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable
from typing import Protocol

MAX_DRAIN_S = 24 * 3600.0


class Draining(Protocol):
    """The proxy's side of it (`proxy/drain.py`)."""

    @property
    def running(self) -> int: ...

    def begin(self) -> None: ...

    async def idle(self) -> None: ...


class Ending:
    """In the event loop's thread.

    Args:
        drain_s: how long requests in flight may go on after SIGTERM.
        say: prints a line. kill: ends everything at once; by default another signal changes nothing.

    Attributes:
        stopping: set when it is time to take everything down.
    """

    def __init__(self, drain_s: float, say: Callable[[str], None], kill: Callable[[], None] = lambda: None) -> None:
        self.stopping = asyncio.Event()
        self._drain_s = drain_s
        self._say = say
        self._kill = kill
        self._asked = asyncio.Event()  # to drain or to stop
        self._front: Draining | None = None

    def listen(self) -> None:
        """Take the signals. In the event loop."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.on_term)
        for number in (signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self.on_quick)

    def serves(self, front: Draining) -> None:
        """`front` takes requests from now on: it is what drains."""
        self._front = front

    def on_term(self) -> None:
        if self._asked.is_set():
            self.on_quick()
        else:
            self._asked.set()

    def on_quick(self) -> None:
        if self.stopping.is_set():
            self._kill()
        self._asked.set()
        self.stopping.set()

    async def wait(self) -> None:
        """Until it is time to take everything down: requests in flight have ended, or have had their time."""
        await self._asked.wait()
        front = self._front
        if self.stopping.is_set() or front is None or self._drain_s <= 0:
            self.stopping.set()
            return
        front.begin()
        if front.running:
            self._say(
                f"draining: {front.running} requests may go on for {self._drain_s:g} s, new ones are refused; "
                "another signal ends it"
            )
        waits = [asyncio.create_task(one) for one in (front.idle(), self._stopped())]
        try:
            await asyncio.wait(waits, timeout=self._drain_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waits:
                one.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await one
        if front.running:
            self._say(f"{front.running} requests are cut off")
        self.stopping.set()

    async def _stopped(self) -> None:
        await self.stopping.wait()
