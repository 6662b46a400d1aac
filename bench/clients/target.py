"""The endpoint as the sender asks it: heads of requests ready but for name and length, and what it serves.

`Request` is what is sent. Whoever makes requests decides what is in them; bodies are bytes made before the run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import httpx

from bench.clients.http import Endpoint, head
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
        headers: of its own, beside those of the target.
    """

    body: bytes | memoryview
    spec: str = ""
    stream: bool = True
    expected_tokens: int | None = None
    cancel_after_s: float | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, body: Mapping[str, Any], spec: str = "", headers: Mapping[str, str] | None = None) -> Request:
        """The request that has `body`."""
        raw = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
        asked = body.get("max_tokens") or body.get("max_completion_tokens")
        expected = asked if body.get("ignore_eos") and isinstance(asked, int) else None
        return cls(raw, spec, stream=bool(body.get("stream")), expected_tokens=expected, headers=headers or {})


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
        self.headers = dict(headers or {})
        for name, value in self.headers.items():
            if not name.isascii() or not name or any(char in name + value for char in "\r\n\0"):
                raise ConfigError(f"header {name!r}: no line breaks, and a name before the colon", param="--header")
        self._head = head(self.endpoint, "POST", path, self.headers)
        self.servers: Sequence[Target] = (self, *(Target(one, headers, path) for one in more))

    def head(self, request_id: str, size_bytes: int, headers: Mapping[str, str] = MappingProxyType({})) -> bytes:
        own = "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode() if headers else b""
        name = request_id.encode()
        return b"%sx-request-id: %s\r\n%scontent-length: %d\r\n\r\n" % (self._head, name, own, size_bytes)

    def served(self) -> list[tuple[str, str]]:
        """(name, where the model lies) of what it serves; "" where it does not say that. Also says whether anybody is
        there, before minutes of load are sent.

        Raises:
            StageError: nobody answers, or not with a list of models.
        """
        answer = self.ask("/v1/models", limit_s=LOOK_S)
        try:
            return [(str(one["id"]), str(one.get("root") or "")) for one in answer.json()["data"]]
        except (ValueError, KeyError, TypeError, AttributeError):
            where = str(self.endpoint)
            raise StageError(f"{where}/v1/models is no list of models: {answer.text[:500]}", stage=where) from None

    def ask(self, path: str, body: Mapping[str, Any] | None = None, *, limit_s: float) -> httpx.Response:
        """One question outside of any load, a GET where there is no `body`.

        Raises:
            StageError: nobody is there, nothing came for `limit_s`, or not with status 200.
        """
        url, method = f"{self.endpoint.url}{path}", "GET" if body is None else "POST"
        # Certificates take 20 ms of a core to load, and stages are looked at while they are measured.
        transport = httpx.HTTPTransport(verify=self.endpoint.tls, uds=self.endpoint.uds or None)
        try:
            with httpx.Client(transport=transport, headers=self.headers, timeout=limit_s) as http:
                answer = http.request(method, url, json=body)
        except httpx.TimeoutException as error:
            raise StageError(f"{url} does not answer within {limit_s:g} s", stage=str(self.endpoint)) from error
        except httpx.HTTPError as error:
            raise StageError(f"{url} cannot be reached ({error!r})", stage=str(self.endpoint)) from error
        if answer.status_code != 200:
            raise StageError(f"{url} answers {answer.status_code}: {answer.text[:500]}", stage=str(self.endpoint))
        return answer

    def token_ids(self, body: Mapping[str, Any], limit_s: float) -> list[int]:
        """Of the whole answer to one request alone. Raises StageError as `ask`, or where there are not `max_tokens`."""
        asked = {name: value for name, value in body.items() if name != "stream_options"}
        answer = self.ask(CHAT, {**asked, "stream": False, "return_token_ids": True}, limit_s=limit_s)
        found: list[int] = answer.json()["choices"][0].get("token_ids") or []
        if len(found) != body["max_tokens"]:
            where = str(self.endpoint)
            raise StageError(f"{where} gives {len(found)} token ids instead of {body['max_tokens']}", stage=where)
        return found
