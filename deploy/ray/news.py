"""What the terminal of an operator shows of a deployment, kept by its controller for whoever is attached to it."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

MOST = 1000
"""Events that are kept for who comes late."""

ASK_EVERY_S, LOOK_S = 0.5, 0.05
"""Between two questions of a terminal, and two looks whether one has asked."""

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
        self._told = 0

    def after(self, life: str, number: int) -> tuple[str, int, list[Event]]:
        """The events from this number on; all there are to who knows another life, none of those where it is below 0.

        Returns:
            The life, the number from which on to ask next, and the events.
        """
        if life != self.life:
            number = 0 if number >= 0 else self._count
        self._told = self._count
        kept = list(self._events)
        return self.life, self._count, kept[len(kept) - min(len(kept), self._count - number) :]

    async def taken(self, wait_s: float) -> None:
        """Wait, not for long, until somebody has been told all, and others have had the time to ask."""
        until = time.monotonic() + wait_s
        while self._told < self._count and time.monotonic() < until:  # noqa: ASYNC110 - a moment, once
            await asyncio.sleep(LOOK_S)
        await asyncio.sleep(2 * ASK_EVERY_S)

    def add(self, name: str, *values: Any) -> None:
        self._events.append((name, values))
        self._count += 1

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
