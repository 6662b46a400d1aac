"""Waiting for somebody who may be said to have gone meanwhile, again and again; and how a call to a node ends that has
not happened."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import TypeVar

from epd_serve.errors import ConfigError, EpdError

RETRY_S = 1.0
T = TypeVar("T")


class LostError(ConfigError):
    """It is no part of the deployment, or is none any more."""


class SilentError(EpdError):
    """It does not answer now. Whether it has been told nobody knows: it may be told again."""

    retryable = True


class SupersededError(EpdError):
    """Whoever asks decides no more: another controller does, in a later epoch."""


async def until_lost(doing: Awaitable[T], lost: asyncio.Event) -> T:
    """Its outcome. Raises LostError when `lost` is set first; what was under way is cancelled then."""
    under_way, gone = asyncio.ensure_future(doing), asyncio.create_task(lost.wait())
    try:
        await asyncio.wait((under_way, gone), return_when=asyncio.FIRST_COMPLETED)
        if not under_way.done():
            raise LostError("it is not there any more")
        return under_way.result()
    finally:
        under_way.cancel()
        gone.cancel()


class Following:
    """What is done for each of several nodes again and again, until another controller has followed this one.

    Args:
        say: takes a line for the operator.

    Attributes:
        superseded: set when a node has heard of a later controller.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.superseded = asyncio.Event()
        self._say = say
        self._parting: set[asyncio.Task[None]] = set()

    async def repeat(self, once: Callable[[], Awaitable[None]], complaint: str) -> None:
        """Where it fails, that is said after the complaint, and it is tried again a moment later."""
        while not self.superseded.is_set():
            try:
                await once()
            except SupersededError:
                self.superseded.set()
            except EpdError as error:
                self._say(f"{complaint}: {error}")
                await asyncio.sleep(RETRY_S)

    def part(self, disconnecting: Coroutine[None, None, None]) -> None:
        """Nobody waits for that but `parted`."""
        parting = asyncio.create_task(disconnecting)
        self._parting.add(parting)
        parting.add_done_callback(self._parting.discard)

    async def parted(self) -> None:
        if self._parting:
            await asyncio.wait(self._parting)
