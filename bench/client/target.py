"""The endpoint as the generator asks it: heads of requests ready but for name and length, and what it serves.

`Ask` is what is sent. Whoever makes asks decides what is in them; bodies are bytes made before the run.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.client.connection import Answer, connect, head
from bench.client.endpoint import Endpoint
from bench.client.sse import said
from epd_serve.errors import ConfigError, StageError

CHAT = "/v1/chat/completions"
LOOK_S = 10.0
"""For a server to say what it serves."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request to be sent.

    Attributes:
        spec: names it in its row. body: JSON. expected_tokens: asked for with `ignore_eos`.
        cancel_after_s: the client leaves then, counted from sending; None: it stays.
        slo_ttft_ms, slo_tpot_ms: of this request alone.
    """

    spec: str
    body: bytes | memoryview
    expected_tokens: int | None = None
    cancel_after_s: float | None = None
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None


class Target:
    """An OpenAI server. `headers` go with every request: keys, an organisation, what a server wants to be told."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None, path: str = CHAT) -> None:
        self.endpoint = Endpoint.of(url)
        for name, value in (headers or {}).items():
            if not name.isascii() or not name or any(char in name + value for char in "\r\n\0"):
                raise ConfigError(f"header {name!r}: no line breaks, and a name before the colon", param="--header")
        self._headers = dict(headers or {})
        self._head = head(self.endpoint, "POST", path, self._headers)

    @property
    def servers(self) -> Sequence[Target]:
        """Those that requests go to, in turn."""
        return (self,)

    def head(self, request_id: str, nbytes: int) -> bytes:
        return b"%sx-request-id: %s\r\ncontent-length: %d\r\n\r\n" % (self._head, request_id.encode(), nbytes)

    async def models(self) -> list[str]:
        """What it serves; also whether anybody is there, before minutes of load are sent.

        Raises:
            StageError: nobody answers, or not with a list of models.
        """
        return [name for name, _ in await self.served()]

    async def served(self) -> list[tuple[str, str]]:
        """(name, where the model lies) of what it serves; "" where it does not say that. Raises as `models`."""
        answer = await self._asked(head(self.endpoint, "GET", "/v1/models", self._headers) + b"\r\n", LOOK_S)
        what = f"{self.endpoint}/v1/models"
        if answer.garbage:
            raise StageError(f"{what} answers with garbage: {answer.garbage}", stage=str(self.endpoint))
        if not answer.ended:
            raise StageError(f"{what} does not answer within {LOOK_S:g} s", stage=str(self.endpoint))
        if answer.status != 200:
            raise StageError(f"{what} answers {answer.status}: {said(answer.tail)}", stage=str(self.endpoint))
        try:
            entries = json.loads(b"".join(piece for _, piece in answer.kept.pieces) if answer.kept else b"")["data"]
            return [(str(entry["id"]), str(entry.get("root") or "")) for entry in entries]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise StageError(f"{what} is no list of models: {said(answer.tail)}", stage=str(self.endpoint)) from None

    async def ask(self, body: bytes, request_id: str, limit_s: float) -> Answer:
        """One request outside of any load, its answer kept whole. Raises StageError where nobody is there."""
        return await self._asked(self.head(request_id, len(body)) + body, limit_s)

    async def _asked(self, request: bytes, limit_s: float) -> Answer:
        connection = await connect(self.endpoint)
        try:
            waiter = connection.ask(request, keep=True)
            await asyncio.wait([waiter], timeout=limit_s)
            return waiter.result() if waiter.done() else Answer()
        finally:
            connection.close()


class InTurn(Target):
    """Several servers of one model, asked in turn: the client balances their load, which costs the servers nothing."""

    def __init__(self, urls: Sequence[str], headers: Mapping[str, str] | None = None) -> None:
        super().__init__(urls[0], headers)
        self._servers = tuple(Target(url, headers) for url in urls)

    @property
    def servers(self) -> Sequence[Target]:
        return self._servers
