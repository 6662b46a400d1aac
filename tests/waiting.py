"""Waiting on conditions. One patience for all tests: only what is broken meets it, however slow the machine is."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

PATIENCE_S = 120.0
_SHORTEST_S, _LONGEST_S = 2e-4, 5e-3  # between two looks: short waits are many, long ones must not keep others waiting
_LONGEST_AFTER_COSTLY_S = 0.1  # looks that ask a server take a fifth of the time at most


def wait_for(condition: Callable[[], Any], what: str = "", timeout_s: float = PATIENCE_S) -> Any:
    """The first true value of `condition`; fails at the deadline and names what it waited for.

    It is asked once more afterwards: what came while the process did not run was not late.
    """
    pause = threading.Event()
    for shortest_s in _pauses(what, timeout_s):
        began = time.monotonic()
        if value := condition():
            return value
        pause.wait(_pause_s(shortest_s, time.monotonic() - began))


async def until(condition: Callable[[], Any], what: str = "", timeout_s: float = PATIENCE_S) -> Any:
    """`wait_for` in an event loop; the condition may be a coroutine function."""
    for shortest_s in _pauses(what, timeout_s):
        began = time.monotonic()
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        await asyncio.sleep(_pause_s(shortest_s, time.monotonic() - began))


def _pauses(what: str, timeout_s: float) -> Iterator[float]:
    """The least pause after each look, until the deadline and once after it; then the failure."""
    end, pause_s, late = time.monotonic() + timeout_s, _SHORTEST_S, False
    while not late:
        late = time.monotonic() >= end
        yield pause_s
        pause_s = min(1.5 * pause_s, _LONGEST_S)
    raise AssertionError(f"waited {timeout_s:g} s for {what or 'a condition'}")


def _pause_s(shortest_s: float, look_s: float) -> float:
    return max(shortest_s, min(4 * look_s, _LONGEST_AFTER_COSTLY_S))
