"""The client's side of one exchange: writes an ASGI response and knows whether it has begun.

The commit point is the first byte of whoever answers: before it a failed attempt may be repeated, after it never. What
may follow then is an attempt that goes on after what the client has, where `goes_on` says that one can.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from starlette.types import Send

from epd_serve.slo import Gaps
from proxy import strict_json

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
