"""Takes in what the runtime says: the front doors hear of it, the waits and steps that it ends are ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from deploy.change.types import Wanted
from deploy.control.actuator import Actuator
from deploy.control.doors import Doors
from deploy.control.overlay import Overlay
from deploy.control.progress import Changes
from deploy.runtime.protocol import Observed, Phase, Runtime

logger = logging.getLogger(__name__)


class Watcher:
    """In the reconciler's event loop.

    Args:
        wanted: what is wanted now. wake: called when something has been taken in.
        retry_s: from a watch that ended to the next.
    """

    def __init__(
        self,
        runtime: Runtime,
        doors: Doors,
        overlay: Overlay,
        changes: Changes,
        actuator: Actuator,
        *,
        wanted: Callable[[], Wanted],
        wake: Callable[[], None],
        retry_s: float,
    ) -> None:
        self._runtime = runtime
        self._doors = doors
        self._overlay = overlay
        self._changes = changes
        self._actuator = actuator
        self._wanted = wanted
        self._wake = wake
        self._retry_s = retry_s

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                async for instances in self._runtime.watch():
                    self.take_in(instances)
            except Exception:
                logger.exception("the runtime cannot be watched")
            await asyncio.sleep(self._retry_s)

    def take_in(self, instances: tuple[Observed, ...]) -> None:
        """All there are."""
        first = self._overlay.instances is None
        flipped = self._overlay.take_in(instances)
        self.publish()
        if first and self._actuator.paused_s:  # in the same roster, or they would go on meanwhile
            self._doors.pause(self._actuator.paused_s)
        for name in flipped:
            self._doors.take_back(name)
        for one in instances:
            name = one.order.id
            if one.phase is Phase.DRAINING and name not in self._overlay.emptying:
                self._actuator.empty(name)  # a controller before this one has asked for it
            if one.phase is Phase.DOWN and name in self._overlay.emptying:  # it has ended by itself
                self._overlay.emptying[name].cancel()
        if self._changes.present is not None:
            self._changes.present.follow({one.order.id: one for one in instances}, self._overlay.flipped)
        self._wake()

    def publish(self) -> None:
        """Once there is a word of the runtime; before it nobody knows what there is."""
        if self._overlay.instances is not None:
            self._doors.publish(self._overlay.instances, self._wanted().roles)
