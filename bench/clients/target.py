"""The endpoint as the sender asks it: heads of requests ready but for name and length, and what it serves.

`Request` is what is sent. Whoever makes requests decides what is in them; bodies are bytes made before the run.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.clients.answers import shortened
from bench.clients.http import Endpoint, Response, connect, head
from epd_serve.errors import ConfigError, StageError

CHAT = "/v1/chat/completions"
LOOK_S = 10.0
"""For a server to say what it serves."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request to be sent.

    Attributes:
        body: JSON. spec: names it in its record. stream: the body asks for a stream.
        expected_tokens: asked for with `ignore_eos`.
        cancel_after_s: the client leaves then, counted from sending; None: it stays.
    """

    body: bytes | memoryview
    spec: str = ""
    stream: bool = True
    expected_tokens: int | None = None
    cancel_after_s: float | None = None

    @classmethod
    def of(cls, body: Mapping[str, Any], spec: str = "") -> Request:
        """The request that has `body`."""
        raw = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
        asked = body.get("max_tokens") or body.get("max_completion_tokens")
        expected = asked if body.get("ignore_eos") and isinstance(asked, int) else None
        return cls(raw, spec, stream=bool(body.get("stream")), expected_tokens=expected)


def requests(bodies: Iterable[Mapping[str, Any]]) -> list[Request]:
    """Requests that have these bodies."""
    return [Request.of(body) for body in bodies]


class Target:
    """An OpenAI server, or several of one model.

    Args:
        url: of several, requests go to them in turn: the client balances their load, which costs the servers nothing.
        headers: go with every request: keys, an organisation, what a server wants to be told.
    """

    def __init__(self, url: str | Sequence[str], headers: Mapping[str, str] | None = None, path: str = CHAT) -> None:
        first, *more = [url] if isinstance(url, str) else url
        self.endpoint = Endpoint.of(first)
        self._headers = dict(headers or {})
        for name, value in self._headers.items():
            if not name.isascii() or not name or any(char in name + value for char in "\r\n\0"):
                raise ConfigError(f"header {name!r}: no line breaks, and a name before the colon", param="--header")
        self._head = head(self.endpoint, "POST", path, self._headers)
        self.servers: Sequence[Target] = (self, *(Target(one, headers, path) for one in more))

    def head(self, request_id: str, size_bytes: int) -> bytes:
        return b"%sx-request-id: %s\r\ncontent-length: %d\r\n\r\n" % (self._head, request_id.encode(), size_bytes)

    async def models(self) -> list[str]:
        """Returns what it serves; also says whether anybody is there, before minutes of load are sent.

        Raises:
            StageError: nobody answers, or not with a list of models.
        """
        return [name for name, _ in await self.served()]

    async def served(self) -> list[tuple[str, str]]:
        """(name, where the model lies) of what it serves; "" where it does not say that. Raises as `models`."""
        response = await self._exchange(head(self.endpoint, "GET", "/v1/models", self._headers) + b"\r\n", LOOK_S)
        if response.garbage:
            wrong = f"answers with garbage: {response.garbage}"
        elif not response.ended_s:
            wrong = f"does not answer within {LOOK_S:g} s"
        elif response.status != 200:
            wrong = f"answers {response.status}: {shortened(response.tail)}"
        else:
            try:
                return [(str(one["id"]), str(one.get("root") or "")) for one in json.loads(response.body)["data"]]
            except (ValueError, KeyError, TypeError, AttributeError):
                wrong = f"is no list of models: {shortened(response.tail)}"
        raise StageError(f"{self.endpoint}/v1/models {wrong}", stage=str(self.endpoint))

    async def ask(self, body: bytes, request_id: str, limit_s: float) -> Response:
        """Sends one request outside of any load, its answer kept whole. Raises StageError where nobody is there."""
        return await self._exchange(self.head(request_id, len(body)) + body, limit_s)

    async def _exchange(self, request: bytes, limit_s: float) -> Response:
        connection = await connect(self.endpoint)
        try:
            waiter = connection.send(request, keep=True)
            await asyncio.wait([waiter], timeout=limit_s)
            return waiter.result() if waiter.done() else Response()
        finally:
            connection.close()
