"""Shows on the screen what a runtime sees of the instances."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from deploy.launch.screen import Shown
from deploy.runtime.protocol import Observed, Runtime
from epd_serve.errors import StageError
from epd_serve.instances import Instance


class StageNews:
    """Args:
        first: ids of the instances that the launch begins with; none where it began before this process did, and
            nothing is news that is so from the start.

    Attributes:
        all_up: set when each of them has answered once, or what there is is known.
        seen: all instances, by id.
    """

    def __init__(self, screen: Shown, first: Iterable[str]) -> None:
        self.all_up = asyncio.Event()
        self.seen: Mapping[str, Observed] = {}
        self._screen = screen
        self._missing = set(first)
        self._silent = not self._missing

    def instances(self) -> dict[str, Instance]:
        """What is told of their present lives."""
        return {name: one.instance for name, one in self.seen.items() if one.instance is not None}

    async def follow(self, runtime: Runtime) -> None:
        """Until cancelled.

        Raises:
            StageError: a first start failed, before all had answered.
        """
        async for item in runtime.watch():
            was, self.seen = self.seen, {one.order.id: one for one in item}
            for gone in was.keys() - self.seen.keys():
                self._screen.gone(gone)
            for name, one in self.seen.items():
                if not self._silent:
                    self._to_screen(one, was.get(name))
            self._silent = False
            self._missing -= {name for name, one in self.seen.items() if one.ever_up}
            if not self._missing:
                self.all_up.set()

    def _to_screen(self, one: Observed, was: Observed | None) -> None:
        name = one.order.id
        if one.over and not (was is not None and was.over):
            if name in self._missing:
                raise StageError(f"stage {name} did not start: {one.reason}", stage=name)
            self._screen.over(name, one.reason)
        if one.pid is not None and (was is None or was.pid != one.pid):
            self._screen.started(name)
        if one.progress:
            self._screen.phase(name, one.progress)
        if one.serves and not (was is not None and was.serves and was.pid == one.pid):
            self._screen.up(name, one.start_s)
        if one.retry_in_s is not None and (was is None or was.retry_in_s is None):
            self._screen.down(name, one.reason, one.retry_in_s)
