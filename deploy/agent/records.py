"""What the next agent has to know, noted with the keeper: one tag for each entry, the newest word of its owner.

Written ahead: who has been answered, or has been told by a watch, can be sure that it is noted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from deploy.keeper.interface import Keeper

logger = logging.getLogger(__name__)

RETRY_S = 0.1


class Records:
    """Of one agent.

    Args:
        now: what is to be noted, by name of the entry. A name that is missing is forgotten.
        written: called when all of what `now` said last is noted.
    """

    def __init__(self, keeper: Keeper, now: Callable[[], Mapping[str, bytes]], written: Callable[[], None]) -> None:
        self._keeper = keeper
        self._now = now
        self._written = written
        self._noted: dict[str, bytes] = {}
        self._one_at_a_time = asyncio.Lock()
        self._woken = asyncio.Event()

    def adopt(self, noted: Mapping[str, bytes]) -> None:
        """These entries are there."""
        self._noted.update(noted)

    def changed(self) -> None:
        """There is something to note; it will be."""
        self._woken.set()

    async def run(self) -> None:
        """Note what changes, until cancelled."""
        while True:
            await self._woken.wait()
            self._woken.clear()
            try:
                await self.write()
            except Exception:  # nothing that waits for it goes on
                logger.exception("what has changed cannot be noted")
                await asyncio.sleep(RETRY_S)
                self.changed()

    async def write(self) -> None:
        """Note what has changed. When it returns, all of it is noted.

        Raises:
            OSError: the keeper has gone.
        """
        async with self._one_at_a_time:
            now = self._now()
            for name, tag in now.items():
                if self._noted.get(name) != tag:
                    await self._keeper.note(name, tag)
                    self._noted[name] = tag
            for name in self._noted.keys() - now.keys():
                try:
                    await self._keeper.forget(name)
                except ValueError:  # what was killed is not gone yet
                    asyncio.get_running_loop().call_later(RETRY_S, self.changed)
                else:
                    del self._noted[name]
            self._written()
