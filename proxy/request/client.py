"""The client's side of one exchange: the time that it gives (`x-epd-deadline-ms`, from arrival, for the whole answer),
the early end of what is done for it, and the ASGI response that it gets.

`with CancelScope() as scope:` runs work in the task that enters it, so that a bound costs no task of its own. Who
decides on its end calls `cancel`, or `cancel_at` beforehand. anyio's scope cancels again in every round of the event
loop, so that nothing that closes connections meanwhile could wait for them.

The commit point of a response is the first byte of whoever answers: before it a failed attempt may be repeated, after
it never. What may follow then is an attempt that goes on after what the client has, where `goes_on` says that one can.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from starlette.datastructures import Headers
from starlette.types import Send

from epd_serve.errors import DeadlineError, RequestError
from epd_serve.slo import Gaps
from proxy import strict_json

Reason = TypeVar("Reason")

RECANCEL_S = 0.5
"""Python 3.11's TaskGroup loses a cancellation that meets a failing child, so it is repeated. Not sooner: another one
interrupts the closing of connections that is under way, and leaves them open."""
HEADER = "x-epd-deadline-ms"
SLO_TTFT, SLO_TPOT = "x-epd-slo-ttft-ms", "x-epd-slo-tpot-ms"
MAX_MS = 24 * 3600 * 1000


class DeadlineLapsed(DeadlineError):
    """The time that the client gave has passed: everything done for it was cancelled."""

    code = "deadline_exceeded"


class DeadlineUnreachable(DeadlineError):
    """The time that the client gave cannot suffice: nothing was done."""

    code = "deadline_unreachable"


def deadline_s(headers: Headers, name: str = HEADER) -> float | None:
    """What a header with a time says, in seconds; None without it.

    Raises:
        RequestError: it is no number of milliseconds.
    """
    values = headers.getlist(name)
    if not values:
        return None
    text = values[0].strip()
    if len(values) > 1 or not (text.isascii() and text.isdecimal()) or len(text) > 9 or not 1 <= int(text) <= MAX_MS:
        raise RequestError(
            f"The header {name} must be sent once, as whole milliseconds between 1 and {MAX_MS}.", param=name
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


EVENT_END = b"\n\n"
CHOICE, OPENING, DELTA = b'"choices":[{', b'"role":"assistant"', b".delta\n"
"""Of events with content, as vLLM writes them: a completion's, of which those with a role have none; a response's."""


class AnswerForm(Protocol):
    """What the client gets in place of what OpenAI's would."""

    def whole(self, status: int, body: bytes) -> bytes:
        """An answer in one piece, or an error, as JSON."""
        ...

    def events(self, events: bytes) -> bytes:
        """These whole events of a stream, of which there may be nothing to send."""
        ...


class ClientSink:
    """Exactly one response: `start`, `write`*, `finish`, or `respond` for all of it at once.

    Args:
        headers: of every answer. late_headers: asked when the response begins.
        gap_limit_s: of the gaps between its events with content. content: what marks such an event.
        form: of the answer, where it is not the stage's.

    Attributes:
        committed: the response has begun: its status has been sent.
        goes_on: whether an attempt could go on after what was sent.
        bytes_sent: of the body. events_sent: of a stream, as the stage sends them. gaps: between those of them with
            content.
    """

    __slots__ = (
        "_before", "_content", "_form", "_headers", "_last", "_late_headers", "_send", "bytes_sent", "committed",
        "events_sent", "finished", "gaps", "goes_on", "status",
    )  # fmt: skip

    def __init__(
        self,
        send: Send,
        headers: Mapping[str, str],
        late_headers: Callable[[], Mapping[str, str]] = dict,
        *,
        gap_limit_s: float = math.inf,
        content: bytes = CHOICE,
        form: AnswerForm | None = None,
    ) -> None:
        self._send = send
        self._headers = headers
        self._late_headers = late_headers
        self.committed = False
        self.finished = False
        self.goes_on: Callable[[], bool] = bool
        self.status = 0
        self.bytes_sent = self.events_sent = 0
        self.gaps = Gaps(gap_limit_s)
        self._content = content
        self._form = form
        self._before = self._last = b""

    @property
    def last(self) -> bytes:
        """The end of the answer, as a stage sends it: why the answer ended stands in it, and what it took."""
        return self._before + self._last

    @property
    def repeatable(self) -> bool:
        """Whether another attempt may still be made."""
        return not self.committed or (not self.finished and self.goes_on())

    async def start_stream(self) -> None:
        await self._start(200, {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"})

    async def write(self, data: bytes) -> None:
        assert self.committed and not self.finished, "write outside of a started response"
        sent = data if self._form is None else self._form.events(data)
        if sent:
            await self._send({"type": "http.response.body", "body": sent, "more_body": True})
        self._count(data, len(sent))  # where it is cut off meanwhile, nothing was sent

    async def finish(self, data: bytes = b"") -> None:
        """End the response, with the last of it."""
        assert self.committed and not self.finished, "the end of a response that is not under way"
        sent = data if self._form is None else self._form.events(data)
        self.finished = True
        if data:
            self._last = self.last  # of all the last three are kept
            self._count(data, len(sent))
        await self._send({"type": "http.response.body", "body": sent, "more_body": False})

    async def respond_json(
        self, status: int, answer: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> None:
        """A whole JSON response."""
        last = strict_json.encode(answer)
        body = last if self._form is None else self._form.whole(status, last)
        await self._start(
            status, {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
        )
        self.finished = True
        self.bytes_sent, self._last = len(body), last
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def _count(self, data: bytes, sent_bytes: int) -> None:
        told = data.count(self._content)
        if not self.events_sent and self._content == CHOICE:
            told -= data.count(OPENING)
        self.gaps.add(time.monotonic(), told)
        self.bytes_sent += sent_bytes
        self.events_sent += data.count(EVENT_END)
        self._before, self._last = self._last, data

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        assert not self.committed, "a second response to one request"
        every = {**self._headers, **self._late_headers(), **headers}
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in every.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})
        self.committed, self.status = True, status
