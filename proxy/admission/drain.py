"""Coming to an end without cutting anybody off: first not ready, then nothing new is accepted, what runs may finish.

serving --announce--> leaving (not ready, still accepts) --begin--> draining (refuses) --> idle
"""

from __future__ import annotations

import asyncio

from proxy.errors import DrainingError


class Drain:
    """Counts the exchanges of one proxy, each of which enters it, and knows whether it is coming to an end."""

    def __init__(self) -> None:
        self.announced = False
        self.began = False
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def running(self) -> int:
        return self._running

    def announce(self) -> None:
        """Say that the end is near: not ready any more, while requests are accepted as ever. Any number of times."""
        self.announced = True

    def begin(self) -> None:
        """Accept nothing more. Any number of times; there is no way back."""
        self.announced = self.began = True

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
