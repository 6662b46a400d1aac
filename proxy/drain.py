"""Coming to an end without cutting anybody off: nothing new is accepted, what runs may finish."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from proxy.errors import DrainingError


class Drain:
    """Counts the exchanges of one proxy, and knows whether it is coming to an end. In the event loop."""

    def __init__(self) -> None:
        self.began = False
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def running(self) -> int:
        return self._running

    def begin(self) -> None:
        """Accept nothing more. Any number of times; there is no way back."""
        self.began = True

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """For the time of one exchange with a client.

        Raises:
            DrainingError: this proxy is coming to an end.
        """
        if self.began:
            raise DrainingError("this server is coming to an end; try again, or elsewhere")
        self._running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def idle(self) -> None:
        """Wait until no exchange is under way; whoever waits sets the deadline."""
        await self._idle.wait()
