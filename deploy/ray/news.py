"""What the terminal of an operator shows of a deployment, kept by its controller for whoever is attached to it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import Sequence
from typing import Any

MOST = 1000
"""Events that are kept for who comes late."""

Event = tuple[str, tuple[Any, ...]]
"""A call of `Shown`, or one of `ready(message)`, `refused(message, param, is it a ConfigError)`, `ended(exit code)`."""


class News:
    """A `Shown` that shows nothing itself.

    Attributes:
        life: of the controller: events of each are numbered from 0.
    """

    def __init__(self) -> None:
        self.life = secrets.token_hex(4)
        self._events: deque[Event] = deque(maxlen=MOST)
        self._count = 0
        self._changed = asyncio.Event()
        self._waiting = 0

    async def after(self, life: str, number: int, wait_s: float) -> tuple[str, int, list[Event]]:
        """The events from this number on, as soon as there are any; all there are to who knows another life.

        Returns:
            The life, the number from which on to ask next, and the events.
        """
        if life != self.life:  # a number below 0: what is there already is not asked for
            number = 0 if number >= 0 else self._count
        self._waiting += 1
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    while number >= self._count:
                        self._changed.clear()
                        await self._changed.wait()
        finally:
            self._waiting -= 1
        kept = list(self._events)
        return self.life, self._count, kept[len(kept) - min(len(kept), self._count - number) :]

    async def taken(self, wait_s: float) -> None:
        """Wait, not for long, until whoever asks has been told all."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while self._waiting:  # noqa: ASYNC110 - a moment, once
                    await asyncio.sleep(0.05)

    def add(self, name: str, *values: Any) -> None:
        self._events.append((name, values))
        self._count += 1
        self._changed.set()

    def open(self, stages: Sequence[str]) -> None:
        self.add("open", tuple(stages))

    def close(self) -> None:
        self.add("close")

    def tick(self) -> None:
        """Terminals have their own clocks."""

    def row(self, stage: str, text: str, running: bool) -> None:
        self.add("row", stage, text, running)

    def gone(self, stage: str) -> None:
        self.add("gone", stage)

    def line(self, text: str) -> None:
        self.add("line", text)
