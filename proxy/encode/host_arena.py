"""The arena of the proxy's own host, asked whether it holds a feature: the truth behind the announcements.

Imported (numpy) where there is one, attached when first asked; never blocks the event loop for long, never raises.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

from store.errors import StoreError

if TYPE_CHECKING:
    from store.arena import Arena

logger = logging.getLogger(__name__)
LOCK_TIMEOUT_S = 0.02  # a holder of the lock that does not run must not stop every request
ASK_AGAIN_S = 1.0


class HostArena:
    """`holds(key)` for `FeatureDirectory`. Without a path it never knows."""

    def __init__(self, path: str) -> None:
        self._path = Path(path) if path else None
        self._arena: Arena | None = None
        self._not_before = 0.0
        self._complained = False

    async def load(self) -> None:
        """Import what it takes, in a thread, before it is asked: on the loop that would hold up every request."""
        if self._path is not None:
            await asyncio.to_thread(importlib.import_module, "store.arena")

    def holds(self, key: str) -> bool | None:
        """Whether the arena has `key`; None without an arena, or while it does not answer."""
        if self._path is None or time.monotonic() < self._not_before:
            return None
        try:
            if self._arena is None:
                from store.arena import Arena

                self._arena = Arena.attach(self._path, prefault=False, lock_timeout_s=LOCK_TIMEOUT_S)
            held = self._arena.contains(key)
        except (StoreError, OSError) as error:
            self._not_before = time.monotonic() + ASK_AGAIN_S
            if not self._complained:
                logger.warning("the arena cannot be asked, announcements have to do: %s", error)
            self._complained = True
            return None
        self._complained = False
        return held

    def close(self) -> None:
        if self._arena is not None:
            try:
                self._arena.close()
            except StoreError as error:
                logger.warning("arena %s was not closed: %s", self._path, error)
            self._arena = None
