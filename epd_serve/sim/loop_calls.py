"""From threads of ours into the event loop of a simulated stage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


def caller(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> Callable[[], None]:
    """What any thread may call to have `call` run in the loop. A loop that has ended hears nothing any more."""

    def ring() -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(call)

    return ring
