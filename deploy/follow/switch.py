"""Whether the load is followed: as the launch said, until an operator says otherwise while it runs.

Nothing of a follower is loaded before there is one, since it takes the planner with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from deploy.follow.types import OFF
from deploy.host.state import State

if TYPE_CHECKING:
    from deploy.control.status import Json
    from deploy.follow.live import Follower

MODE = "follow"
"""The note of the mode that was set last."""


class Switch:
    """In the event loop of control (`deploy.control.controller.Following`).

    Args:
        launched: the mode of the launch, for as long as no other one was set.
        notes: of the deployment: the next life of control goes on in the mode that was set last.
    """

    def __init__(self, launched: str, notes: State) -> None:
        self._launched, self._notes = launched, notes
        self._make: Callable[[], Follower] | None = None
        self._follower: Follower | None = None
        self._made = asyncio.Event()

    async def begin(self, make: Callable[[], Follower]) -> None:
        """In the mode that was set last. Raises ConfigError: as `make`, and the mode is `off`."""
        self._make = make
        noted = self._notes.read(MODE)
        await self.set(noted.decode() if noted is not None else self._launched)

    async def set(self, mode: str) -> None:
        """To `off`, `advise` or `act`. Once it returns nothing begins any more by the mode before; a change that has
        begun goes on.

        Raises:
            ConfigError: there can be no follower, by its settings; the mode stays as it was.
        """
        if self._follower is None and mode != "off":
            assert self._make is not None, "begun"
            self._follower = self._make()
            self._made.set()
        if self._follower is not None:
            await self._follower.switch(mode)
        self._notes.write(MODE, mode.encode())
        await self._notes.kept()

    def told(self, most: int | None = None) -> Json:
        """The mode, and decisions, the newest first, at most so many; those before it was set to `off`, too."""
        if self._follower is None:
            return dict(OFF)
        from deploy.follow.report import follow_json

        return follow_json(self._follower, most)

    async def run(self) -> None:
        """For ever."""
        await self._made.wait()
        assert self._follower is not None
        await self._follower.run()
