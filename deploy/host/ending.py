"""What signals ask of a process that serves: SIGTERM to drain, SIGINT and SIGHUP to end at once, the next one more.

    serving --SIGTERM--> leaving --its time, or SIGTERM--> draining --any signal, or drained--> stopping --any--> killed
    serving, leaving --SIGINT, SIGHUP--> stopping

While it is leaving (the lame duck) it is not ready and serves on: load balancers need a moment to notice, and whatever
they send meanwhile is answered. Owns the order of these, and the waits. Leaves to each command what stopping means.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine
from typing import Protocol

from proxy.workers.shared_counters import Asked

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
MAX_DRAIN_S = 24 * 3600.0


class Draining(Protocol):
    """The proxy's side of it (`proxy/admission/gate.py`), of all front doors."""

    @property
    def running(self) -> int: ...

    def ask(self, asked: Asked) -> None: ...

    async def idle(self) -> None: ...


class Ending:
    """In the event loop's thread.

    Args:
        lame_duck_s: how long requests are still accepted after SIGTERM. drain_s: how long those in flight may go on
            then.
        say: prints a line. kill: ends everything at once; by default another signal changes nothing.

    Attributes:
        stopping: set when it is time to take everything down.
    """

    def __init__(
        self,
        lame_duck_s: float,
        drain_s: float,
        say: Callable[[str], None],
        kill: Callable[[], None] = lambda: None,
    ) -> None:
        self.stopping = asyncio.Event()
        self._lame_duck_s = lame_duck_s
        self._drain_s = drain_s
        self._say = say
        self._kill = kill
        self._asked = asyncio.Event()  # to drain or to stop
        self._refuse = asyncio.Event()  # no more waiting for load balancers
        self._front: Draining | None = None

    def listen(self) -> None:
        """Take the signals. In the event loop."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self.take, number)

    def take(self, number: int) -> None:
        """A signal has come."""
        if number != signal.SIGTERM or self._refuse.is_set():
            if self.stopping.is_set():
                self._kill()
            self.stopping.set()
        if self._asked.is_set() or self.stopping.is_set():
            self._refuse.set()
        self._asked.set()

    def serves(self, front: Draining) -> None:
        """`front` takes requests from now on: it is what drains."""
        self._front = front

    async def wait(self) -> None:
        """Until it is time to take everything down: requests in flight have ended, or have had their time."""
        await self._asked.wait()
        if self._front is not None:
            await self._leave(self._front)
            await self._drain(self._front)
        self.stopping.set()

    async def _leave(self, front: Draining) -> None:
        if self.stopping.is_set():
            return
        front.ask(Asked.LEAVE)
        if self._lame_duck_s > 0:
            self._say(
                f"not ready any more; requests are accepted for {self._lame_duck_s:g} s, or until another SIGTERM"
            )
            await _first(self._lame_duck_s, self._refuse.wait())
        self._refuse.set()

    async def _drain(self, front: Draining) -> None:
        if self.stopping.is_set() or self._drain_s <= 0:
            return
        front.ask(Asked.DRAIN)
        if front.running:
            self._say(
                f"draining: {front.running} requests may go on for {self._drain_s:g} s, new ones are refused; "
                "another signal ends it"
            )
        await _first(self._drain_s, front.idle(), self.stopping.wait())
        if front.running:
            self._say(f"{front.running} requests are cut off")


async def _first(timeout_s: float, *waits: Coroutine[None, None, object]) -> None:
    """Until one of them is over, or the time."""
    tasks = [asyncio.create_task(one) for one in waits]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
