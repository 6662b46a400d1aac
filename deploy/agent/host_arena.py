"""The arena of this host (MM Store tier 1): made when an instance first needs it, whole from when it has its name."""

from __future__ import annotations

import asyncio
from pathlib import Path

from epd_serve.errors import ConfigError
from store.errors import StoreError


class HostArena:
    """At `path`. It outlives the agent that has made it, and goes with the run directory."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        self._path = path
        self._size_bytes = size_bytes
        self._making: asyncio.Task[None] | None = None

    async def make(self) -> None:
        """It is there, pre-faulted, before any stage attaches to it. Any number of calls.

        Raises:
            ConfigError: there is no room for it.
        """
        if self._path.exists():
            return
        if self._making is None or self._making.done():
            self._making = asyncio.create_task(asyncio.to_thread(self._make))
        try:
            await asyncio.shield(self._making)
        except StoreError as error:
            raise ConfigError(str(error)) from error

    async def settled(self) -> None:
        """Nobody makes it any more: a thread goes on, and what it makes has to be there to be removed."""
        if self._making is not None:
            await asyncio.wait([self._making])

    def _make(self) -> None:
        from store.arena import Arena

        unnamed = self._path.with_suffix(".new")
        unnamed.unlink(missing_ok=True)
        Arena.create(unnamed, capacity_bytes=self._size_bytes).close()
        unnamed.rename(self._path)
