"""Waiting for somebody who may be said to have gone meanwhile; and how a call to a node ends that has not happened."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from epd_serve.errors import ConfigError, EpdError

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
