"""The arena of the proxy's own host, asked whether it holds a feature: the truth behind the announcements.

Attached when first asked; never blocks the event loop for long, never raises.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

from store.arena import Arena
from store.errors import StoreError

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

    def holds(self, key: str) -> bool | None:
        """Whether the arena has `key`; None without an arena, or while it does not answer."""
        if self._path is None or time.monotonic() < self._not_before:
            return None
        try:
            if self._arena is None:
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
