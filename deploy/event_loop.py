"""The event loop of the processes that hold the proxy: uvloop, which relays at about half the cost, where it is there.

uvloop comes with every vLLM, yet not on every platform: without it asyncio's own loop does the same. Signal handlers,
`asyncio.run`'s way of ending and debugging are those of asyncio in both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from epd_serve import garbage

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, in a process that serves from now on."""
    garbage.settle()
    with asyncio.Runner(loop_factory=_factory()) as runner:
        return runner.run(main)


def _factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
