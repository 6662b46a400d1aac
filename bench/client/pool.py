"""Connections of the load generator that are kept between requests."""

from __future__ import annotations

import asyncio
import time

from bench.client.connection import Answer, Connection, connect
from bench.client.endpoint import Endpoint


class Pool:
    """Connections to one server, the one used last first; those that lay unused for long are dropped.

    Args:
        idle_s: the server may be about to close one that lay unused for longer.
    """

    def __init__(self, url: str | Endpoint, idle_s: float = 2.0) -> None:
        self._url = url
        self._idle_s = idle_s
        self._idle: list[tuple[float, Connection]] = []

    async def take(self) -> Connection:
        """A connection that nobody uses. Raises StageError where the server cannot be reached."""
        while self._idle:
            since, connection = self._idle.pop()
            if connection.usable and time.perf_counter() - since < self._idle_s:
                return connection
            connection.close()
        return await connect(self._url)

    async def ask(self, request: bytes, limit_s: float) -> Answer | None:
        """The answer, or None after `limit_s`. Raises StageError where the server cannot be reached."""
        connection = await self.take()
        waiter = connection.ask(request)
        done, _ = await asyncio.wait([waiter], timeout=limit_s)
        if not done:
            connection.close()
            return None
        self.put_back(connection)
        return waiter.result()

    def put_back(self, connection: Connection) -> None:
        if connection.usable:
            self._idle.append((time.perf_counter(), connection))

    def close(self) -> None:
        for _, connection in self._idle:
            connection.close()
        self._idle.clear()
