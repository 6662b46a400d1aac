"""Keeps what is leased and what is wanted in step.

When a place moves or a node dies the same layout is aimed anew, and what nobody uses any more is given back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping

from deploy.control.aim import Aim
from deploy.control.reconciler import Reconciler
from deploy.runtime.leases import Leases, Place

logger = logging.getLogger(__name__)


class Places:
    """In the reconciler's event loop.

    Args:
        look_s: between looks; a place that moves is looked at once.

    Attributes:
        turn: held by whoever aims, until what he aims at is wanted or refused.
        leased: as it was last seen. free: devices that could be leased then, by node.
    """

    def __init__(self, aim: Aim, reconciler: Reconciler, *, look_s: float) -> None:
        self.turn = asyncio.Lock()
        self.leased: tuple[Place, ...] = ()
        self.free: Mapping[str, int] = {}
        self._aim = aim
        self._reconciler = reconciler
        self._look_s = look_s
        self._woken = asyncio.Event()

    async def keep(self) -> None:
        """Until cancelled; returns at once where nothing is lent."""
        if (leases := self._aim.leases) is None:
            return
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow(leases))
            while True:
                self._woken.clear()
                try:
                    await self._look(leases)
                except Exception as error:  # noqa: BLE001 - nodes go and come: the next look may do better
                    logger.warning("what is leased cannot be kept in step: %s", error or type(error).__name__)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._look_s):
                        await self._woken.wait()

    def look_soon(self) -> None:
        """Something may be used no more."""
        self._woken.set()

    async def _look(self, leases: Leases) -> None:
        reconciler = self._reconciler
        async with self.turn:
            if not reconciler.knows:
                return
            self.free = await leases.free()
            if any(node.id not in self.free for node in reconciler.nodes):
                await reconciler.look()
            places = self.leased = await leases.places()
            if self._aim.has_moved(reconciler.wanted, places):
                await reconciler.look()
                wanted = reconciler.wanted
                fresh = await self._aim.again(wanted.layout, wanted.specs, places, core_share=wanted.core_share)
                if reconciler.wanted is wanted:  # nobody wants something else by now
                    reconciler.aim_anew(fresh)
            if unused := self._aim.unused(reconciler.wanted, reconciler.used, places):
                await leases.release(unused)

    async def _follow(self, leases: Leases) -> None:
        while True:
            try:
                async for self.leased in leases.watch():
                    self._woken.set()
            except Exception as error:  # noqa: BLE001 - whoever lends is away for a while
                logger.warning("what is leased cannot be watched: %s", error or type(error).__name__)
            await asyncio.sleep(self._look_s)
