"""Carries out what the rules decide: tells the runtime and the front doors, and keeps the waits that follow from it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from deploy.change.types import Action, Drain, Flip, Leave, Pause, Resume, Start, Stop
from deploy.control.doors import Doors
from deploy.control.failure import Deadlines
from deploy.control.overlay import Overlay
from deploy.control.progress import Changes
from deploy.front.occupancy import under_way
from deploy.runtime.protocol import Observed, Order, Phase, Runtime

logger = logging.getLogger(__name__)


class Actuator:
    """In the reconciler's event loop.

    Args:
        overlay: where what was asked for is noted. changes: whose steps are closed as they end.
        wake: called when a wait is over: time for another look.
        write: called when the end of a pause has become another one, and waited for before it is told.
        say: takes a line for the operator.
        paused_until: seconds since the epoch; 0 while requests do not wait.
    """

    def __init__(
        self,
        runtime: Runtime,
        doors: Doors,
        overlay: Overlay,
        changes: Changes,
        deadlines: Deadlines,
        *,
        wake: Callable[[], None],
        write: Callable[[], Awaitable[None]],
        say: Callable[[str], None],
        paused_until: float = 0.0,
    ) -> None:
        self._runtime = runtime
        self._doors = doors
        self._overlay = overlay
        self._changes = changes
        self._deadlines = deadlines
        self._wake = wake
        self._write = write
        self._say = say
        self.paused_until = paused_until
        self._paused_at: float | None = time.monotonic() if paused_until else None

    async def do(self, action: Action) -> None:
        """Returns when it is accepted; may be asked for again.

        Raises:
            ConfigError: the runtime refuses it. TimeoutError and others: nobody knows whether it has taken effect.
        """
        async with asyncio.timeout(self._deadlines.call_s):
            match action:
                case Start(name, spec):
                    self._stay(name)
                    await self._runtime.start(Order(name, spec))
                    self._note_started(Observed(Order(name, spec), Phase.STARTING))
                case Drain(name):
                    await self._runtime.drain(name)
                    self.empty(name)
                case Stop(name):
                    if name not in self._overlay.stopping:
                        self._overlay.stopping[name] = asyncio.create_task(self._stop(name), name=f"stop {name}")
                case Leave(name):
                    self._doors.drain(name)
                    self._overlay.leaving[name] = self._awaited(self._doors.until_quiet(name))
                case Flip(name, role):
                    await self._runtime.flip(name, role)
                    self._changes.close(Leave, name)
                    if (leaving := self._overlay.leaving.pop(name, None)) is not None:
                        leaving.cancel()
                    self._overlay.flipped[name] = role
                case Pause():
                    await self._pause()
                case Resume():
                    await self._resume()

    def empty(self, name: str) -> None:
        """Give it nothing new, and wait until nothing is left on it."""
        self._doors.drain(name)
        if name not in self._overlay.emptying:
            self._overlay.emptying[name] = self._awaited(self._until_empty(name))

    def stay_all(self) -> None:
        """Who was to leave may stay."""
        for name, task in tuple(self._overlay.leaving.items()):
            task.cancel()
            del self._overlay.leaving[name]
            self._doors.take_back(name)

    @property
    def paused(self) -> bool:
        return self._paused_at is not None

    @property
    def paused_s(self) -> float:
        """For how long new requests still wait; 0 while they do not."""
        return max(0.0, self.paused_until - time.time()) if self.paused else 0.0

    def _note_started(self, one: Observed) -> None:
        name = one.order.id
        if self._changes.present is not None:
            self._changes.present.started.setdefault(name, time.monotonic())
        if all(other.order.id != name for other in self._overlay.instances or ()):
            self._overlay.started[name] = one, time.monotonic()

    def _stay(self, name: str) -> None:
        """One that drains is taken back."""
        if (emptying := self._overlay.emptying.pop(name, None)) is not None:
            emptying.cancel()
            self._doors.take_back(name)

    async def _until_empty(self, name: str) -> None:
        try:
            async with asyncio.timeout(self._deadlines.drain_s):
                await self._doors.until_empty(name)
        except TimeoutError:
            cut = under_way(self._doors, name)
            self._say(f"{name} had {self._deadlines.drain_s:g} s to drain (--drain-s): {cut} requests are cut off")
            if self._changes.present is not None:
                self._changes.present.cut += cut
        self._changes.close(Drain, name)

    async def _stop(self, name: str) -> None:
        try:
            async with asyncio.timeout(self._deadlines.stop_s + self._deadlines.call_s):
                await self._runtime.stop(name, self._deadlines.stop_s)
        except Exception as error:  # noqa: BLE001 - asked for again at the next look
            logger.warning("%s could not be stopped: %s", name, error or type(error).__name__)
            await asyncio.sleep(self._deadlines.retry_s)
            self._overlay.stopping.pop(name, None)
            self._wake()

    def _awaited(self, what: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(what)
        task.add_done_callback(lambda _: self._wake())
        return task

    async def _pause(self) -> None:
        change = self._changes.present
        assert change is not None, "only a change pauses"
        self._paused_at = time.monotonic()
        self.paused_until = time.time() + change.pause_s
        await self._write()
        self._doors.pause(change.pause_s)

    async def _resume(self) -> None:
        if self._paused_at is not None:
            if self._changes.present is not None:
                self._changes.present.paused_s += time.monotonic() - self._paused_at
            self._paused_at, self.paused_until = None, 0.0
            await self._write()
            self._doors.resume()
        self._changes.close(Pause)
        self._changes.close(Resume)
