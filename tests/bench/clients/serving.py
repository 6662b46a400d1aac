"""A known server in a thread, for commands that have the main thread's loop."""

from __future__ import annotations

import asyncio
import threading

from tests.bench.clients.known_server import KnownServer


class Served(threading.Thread):
    """A known server in a loop of its own, since the command has the main thread's."""

    def __init__(self, server: KnownServer | None = None) -> None:
        super().__init__(daemon=True)
        self.server = server or KnownServer()
        self._over = asyncio.Event()
        self._loop = asyncio.new_event_loop()

    def run(self) -> None:
        async def serve() -> None:
            async with self.server.serving():
                await self._over.wait()

        self._loop.run_until_complete(serve())
        self._loop.close()

    def stop(self) -> None:
        if self.is_alive():
            self._loop.call_soon_threadsafe(self._over.set)
            self.join()
