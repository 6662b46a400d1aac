"""The client's side of one exchange: writes an ASGI response and knows whether it has begun.

The commit point is the first byte of whoever answers: before it a failed attempt may be repeated, after it never. A
first token that was shown ahead of the answer (`shown`) is not that: an attempt may follow that goes on after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct
from starlette.types import Send

from proxy import strict_json


class ShownToken(Struct, frozen=True):
    """What a client has of an answer whose first token it was shown.

    Attributes:
        token: its id.
        text: of it, never empty.
    """

    token: int
    text: str


class ClientSink:
    """Exactly one response: `start`, `write`*, `finish`, or `respond` for all of it at once.

    Args:
        headers: of every answer. late_headers: asked when the response begins.

    Attributes:
        committed: the response has begun: its status has been sent.
        shown: the first token, where the client has that and nothing else.
    """

    __slots__ = ("_headers", "_late_headers", "_send", "committed", "finished", "shown", "status")

    def __init__(
        self, send: Send, headers: Mapping[str, str], late_headers: Callable[[], Mapping[str, str]] = dict
    ) -> None:
        self._send = send
        self._headers = headers
        self._late_headers = late_headers
        self.committed = False
        self.finished = False
        self.shown: ShownToken | None = None
        self.status = 0

    @property
    def repeatable(self) -> bool:
        """Whether another attempt may still be made."""
        return not self.committed or (self.shown is not None and not self.finished)

    async def start_stream(self) -> None:
        await self._start(200, {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"})

    async def write(self, data: bytes) -> None:
        assert self.committed and not self.finished, "write outside of a started response"
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self, data: bytes = b"") -> None:
        """End the response, with the last of it."""
        assert self.committed and not self.finished, "the end of a response that is not under way"
        self.finished = True
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
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        assert not self.committed, "a second response to one request"
        self.committed = True
        self.status = status
        every = {**self._headers, **self._late_headers(), **headers}
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in every.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})
