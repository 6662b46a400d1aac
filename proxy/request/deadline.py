"""The early end of a request: its client's own deadline (`x-epd-deadline-ms`, the time from arrival within which the
whole answer is wanted), and work that may be cancelled from outside: its client has left, its time is over, its stage
has fallen silent.

`with CancelScope() as scope:` runs the work in the task that enters it, so that a bound costs no task of its own. Who
decides on its end calls `cancel`, or `cancel_at` beforehand. anyio's scope cancels again in every round of the event
loop, so that nothing that closes connections meanwhile could wait for them.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Generic, Self, TypeVar

from starlette.datastructures import Headers

from epd_serve.errors import DeadlineError, RequestError

Reason = TypeVar("Reason")

RECANCEL_S = 0.5
"""Python 3.11's TaskGroup loses a cancellation that meets a failing child, so it is repeated. Not sooner: another one
interrupts the closing of connections that is under way, and leaves them open."""
HEADER = "x-epd-deadline-ms"
MAX_MS = 24 * 3600 * 1000


class DeadlineLapsed(DeadlineError):
    """The time that the client gave has passed: everything done for it was cancelled."""

    code = "deadline_exceeded"


class DeadlineUnreachable(DeadlineError):
    """The time that the client gave cannot suffice: nothing was done."""

    code = "deadline_unreachable"


def deadline_s(headers: Headers) -> float | None:
    """Seconds from arrival, or None without the header.

    Raises:
        RequestError: it is no number of milliseconds.
    """
    values = headers.getlist(HEADER)
    if not values:
        return None
    text = values[0].strip()
    if len(values) > 1 or not (text.isascii() and text.isdecimal()) or len(text) > 9 or not 1 <= int(text) <= MAX_MS:
        raise RequestError(
            f"The header {HEADER} must be sent once, as whole milliseconds between 1 and {MAX_MS}.", param=HEADER
        )
    return int(text) / 1000


class CancelScope(Generic[Reason]):
    """Entered once. `reason` tells afterwards why it was cancelled; None where it came to an end of its own.

    Where it was cancelled, leaving the context swallows the cancellation that did it. Any other one passes.
    """

    __slots__ = ("_again", "_cancels", "_loop", "_others", "_task", "_timer", "reason")

    def __init__(self) -> None:
        self.reason: Reason | None = None
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[object] | None = None
        self._cancels = self._others = 0
        self._timer: asyncio.TimerHandle | None = None
        self._again: asyncio.TimerHandle | None = None

    def cancel_at(self, when: float, reason: Reason) -> None:
        """Cancel at this loop time, unless it has ended by then. The time given last counts."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self.cancel, reason)

    def cancel(self, reason: Reason) -> None:
        """Cancel. The first reason counts; without effect once it has ended."""
        if self._task is not None and self.reason is None:
            self.reason = reason
            self._cancel()

    def __enter__(self) -> Self:
        self._task = asyncio.current_task(self._loop)
        assert self._task is not None, "entered within a task"
        self._others = self._task.cancelling()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        task, self._task = self._task, None
        assert task is not None, "entered before"
        if self._timer is not None:
            self._timer.cancel()
        if self.reason is None:
            return False
        if self._again is not None:
            self._again.cancel()
        for _ in range(self._cancels):
            task.uncancel()
        return isinstance(error, asyncio.CancelledError) and task.cancelling() <= self._others

    def _cancel(self) -> None:
        assert self._task is not None, "a timer of one that has ended"
        self._cancels += 1
        self._task.cancel()
        self._again = self._loop.call_later(RECANCEL_S, self._cancel)
