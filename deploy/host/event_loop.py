"""The event loop of the processes that hold the proxy: uvloop, which relays at about half the cost, where it is there.

uvloop comes with every vLLM, yet not on every platform: without it asyncio's own loop does the same. Signal handlers,
`asyncio.run`'s way of ending and debugging are those of asyncio in both, but that signals which uvloop has handled do
nothing after its end.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from epd_serve import garbage

T = TypeVar("T")
M_MMAP_THRESHOLD = -3
LARGE_BYTES = 1 << 20


def run(main: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, in a process that serves from now on."""
    garbage.freeze_gc()
    _return_large_blocks()
    with asyncio.Runner(loop_factory=_factory()) as runner:
        return runner.run(main)


async def together(*tasks: Coroutine[None, None, None]) -> None:
    """All of them, until one fails: then all end. Raises the most telling of their errors."""
    from proxy.errors import most_telling

    try:
        async with asyncio.TaskGroup() as group:
            for one in tasks:
                group.create_task(one)
    except BaseExceptionGroup as failed:
        raise most_telling(failed) from None


async def first(*waits: Awaitable[T]) -> T:
    """The outcome of whichever is over first; the others are cancelled, and have ended."""
    tasks = [asyncio.ensure_future(one) for one in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task.result() for task in tasks if task.done())
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def _return_large_blocks() -> None:
    """Have the memory of bodies and media go back to the system when it is freed. Once it has seen one of them freed,
    glibc keeps blocks of up to 32 MiB otherwise, whose room is lost to the next that is larger (mallopt(3))."""
    tune = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none, and other ways
    if tune is not None:
        tune(M_MMAP_THRESHOLD, LARGE_BYTES)


def _factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
