"""Coming to an end without cutting anybody off: nothing new is accepted, what runs may finish."""

from __future__ import annotations

import asyncio

from proxy.errors import DrainingError


class Drain:
    """Counts the exchanges of one proxy, each of which enters it, and knows whether it is coming to an end."""

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

    def __enter__(self) -> None:
        """An exchange with a client begins.

        Raises:
            DrainingError: this proxy is coming to an end.
        """
        if self.began:
            raise DrainingError("this server is coming to an end; try again, or elsewhere")
        self._running += 1
        self._idle.clear()

    def __exit__(self, *_: object) -> None:
        self._running -= 1
        if not self._running:
            self._idle.set()

    async def idle(self) -> None:
        """Wait until no exchange is under way; whoever waits sets the deadline."""
        await self._idle.wait()
