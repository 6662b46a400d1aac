"""The client's side of one exchange: writes an ASGI response and knows whether it has begun.

The commit point is the first byte of whoever answers: before it a failed attempt may be repeated, after it never. What
may follow then is an attempt that goes on after what the client has, where `goes_on` says that one can.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from starlette.types import Send

from epd_serve.slo import Gaps
from proxy import strict_json

EVENT_END = b"\n\n"
CHOICE, OPENING, DELTA = b'"choices":[{', b'"role":"assistant"', b".delta\n"
"""Of events with content, as vLLM writes them: a completion's, of which those with a role have none; a response's."""


class ClientSink:
    """Exactly one response: `start`, `write`*, `finish`, or `respond` for all of it at once.

    Args:
        headers: of every answer. late_headers: asked when the response begins.
        gap_limit_s: of the gaps between its events with content. content: what marks such an event.

    Attributes:
        committed: the response has begun: its status has been sent.
        goes_on: whether an attempt could go on after what was sent.
        bytes_sent: of the body. events_sent: of a stream. gaps: between those of them with content.
    """

    __slots__ = (
        "_before", "_content", "_headers", "_last", "_late_headers", "_send", "bytes_sent", "committed", "events_sent",
        "finished", "gaps", "goes_on", "status",
    )  # fmt: skip

    def __init__(
        self,
        send: Send,
        headers: Mapping[str, str],
        late_headers: Callable[[], Mapping[str, str]] = dict,
        *,
        gap_limit_s: float = math.inf,
        content: bytes = CHOICE,
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
        self._before = self._last = b""

    @property
    def last(self) -> bytes:
        """The end of what was sent, as it was written: why the answer ended stands in it, and what it took."""
        return self._before + self._last

    @property
    def repeatable(self) -> bool:
        """Whether another attempt may still be made."""
        return not self.committed or (not self.finished and self.goes_on())

    async def start_stream(self) -> None:
        await self._start(200, {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"})

    async def write(self, data: bytes) -> None:
        assert self.committed and not self.finished, "write outside of a started response"
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._count(data)  # where it is cut off meanwhile, nothing was sent

    async def finish(self, data: bytes = b"") -> None:
        """End the response, with the last of it."""
        assert self.committed and not self.finished, "the end of a response that is not under way"
        self.finished = True
        if data:
            self._last = self.last  # of all the last three are kept
            self._count(data)
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def respond_json(
        self, status: int, answer: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> None:
        """A whole JSON response."""
        body = strict_json.encode(answer)
        await self._start(
            status, {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
        )
        self.finished = True
        self.bytes_sent, self._last = len(body), body
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def _count(self, data: bytes) -> None:
        told = data.count(self._content)
        if not self.events_sent and self._content == CHOICE:
            told -= data.count(OPENING)
        self.gaps.add(time.monotonic(), told)
        self.bytes_sent += len(data)
        self.events_sent += data.count(EVENT_END)
        self._before, self._last = self._last, data

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        assert not self.committed, "a second response to one request"
        every = {**self._headers, **self._late_headers(), **headers}
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in every.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})
        self.committed, self.status = True, status
