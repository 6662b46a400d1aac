"""Bounds a wait, and names what took too long."""

from __future__ import annotations

import asyncio
from types import TracebackType

from epd_serve.errors import DeadlineError


class deadline:
    """Bound a wait and name it: DeadlineError when it ran out."""

    def __init__(self, seconds: float, what: str) -> None:
        self._seconds = seconds
        self._what = what

    async def __aenter__(self) -> None:
        self._scope = asyncio.timeout(self._seconds)
        await self._scope.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._scope.__aexit__(kind, error, trace)
        except TimeoutError as late:
            raise DeadlineError(f"{self._what} took longer than {self._seconds:g} s") from late
