"""Streams as vLLM 0.32 writes them, what a client makes of them, and what is kept of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, MutableMapping, Sequence
from typing import Any

from hypothesis import strategies as st

from proxy.config.limits import MigrationLimits
from proxy.generate.relay import Client
from proxy.request.client import ClientSink
from proxy.stages.history import Continuation, HistoryRoom, TokenHistory
from proxy.stages.sse import Event, WholeEvents, split
from tests.proxy.fakes import DONE, opening

Tokens = Sequence[tuple[int, str]]


def given_of(*events: bytes) -> TokenHistory:
    given = TokenHistory(HistoryRoom(MigrationLimits()))
    for event in events:
        given.begin()
        given.add(Event(event).chunk)
    return given


def rest_of(given: TokenHistory, stream: bytes) -> bytes:
    """What a client lacks of another stage's stream."""
    going_on, news = Continuation(given, stage="D1"), b""
    for event in split(stream):  # so that each is a read of its own
        news += b"".join(one.raw for one in going_on.rest([Event(event)]))
    return going_on.dated(news)


class Reader:
    """What a client was sent."""

    def __init__(self, *, asks: bool = True) -> None:
        self.got = b""
        self.sink = ClientSink(self._send, {})
        self.given = given_of()
        self.client = Client(self.sink, self.given, hides=not asks, keeps=True)

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        await asyncio.sleep(0)  # others may run meanwhile
        self.got += message.get("body", b"")


class Form:
    """Events as vLLM 0.32 writes them, of a chat or a completion, with what a client may ask for."""

    def __init__(self, *, chat: bool, logprobs: bool = False, ids: bool = False, usage: bool = False) -> None:
        self.chat, self.logprobs, self.ids, self.usage = chat, logprobs, ids, usage

    def event(self, tokens: Tokens, finish: str | None = None, stop: str | int | None = None, **more: Any) -> bytes:
        text = "".join(said for _, said in tokens)
        choice: dict[str, Any] = {"index": 0}
        choice |= {"delta": {"content": text}} if self.chat else {"text": text}
        choice["logprobs"] = self._logprobs(tokens) if self.logprobs else None
        choice["finish_reason"] = finish
        if finish or not self.chat:
            choice["stop_reason"] = stop
        choice["token_ids"] = [token for token, _ in tokens] if self.ids else None
        return self.written(choices=[choice], **more)

    def written(self, **fields: Any) -> bytes:
        return b"data: " + json.dumps({"id": "x", "created": 1, **fields}, separators=(",", ":")).encode() + b"\n\n"

    def stream(self, tokens: Tokens, cuts: Sequence[int] = (), finish: str = "stop") -> bytes:
        """Of a stage that answers with all of these: an event per token, those in `cuts` together with the next."""
        events, gathered = opening(0) if self.chat else b"", []
        for number, token in enumerate(tokens):
            gathered.append(token)
            last = number == len(tokens) - 1
            if last or number not in cuts:
                events += self.event(gathered, finish if last else None)
                gathered = []
        if self.usage:
            events += self.written(choices=[], usage={"completion_tokens": len(tokens)})
        return events + DONE

    def first(self, tokens: Tokens, said: str) -> bytes:
        """Of P, which ends at its first token."""
        events = opening(0) if self.chat else b""
        events += self.event(tokens[:1], "length", said, system_fingerprint="vllm")
        if self.usage:
            events += self.written(choices=[], usage={"completion_tokens": 1})
        return events + DONE

    def _logprobs(self, tokens: Tokens) -> dict[str, Any]:
        if self.chat:
            return {"content": [{"token": said, "logprob": -token / 8} for token, said in tokens]}
        return {
            "tokens": [said for _, said in tokens],
            "token_logprobs": [-token / 8 for token, _ in tokens],
            "top_logprobs": [{said: -token / 8} for token, said in tokens],
            "text_offset": [token for token, _ in tokens],
        }


def meaning(stream: bytes) -> dict[str, Any]:
    """All that a client can gather from a stream, but for where it was cut into events."""
    text, ids, logprobs, ends, usage = "", [], [], [], []
    events = split(stream)
    assert events[-1] == DONE and DONE not in events[:-1]
    assert sum(event == opening(0) for event in events) <= 1
    for event in events[:-1]:
        answer = json.loads(event.removeprefix(b"data: "))
        usage += [answer["usage"]] if "usage" in answer else []
        for choice in answer["choices"]:
            text += choice.get("delta", choice).get("content" if "delta" in choice else "text") or ""
            ids += choice.get("token_ids") or []
            said = choice.get("logprobs") or {}
            logprobs += said.get("content") or list(zip(*said.values(), strict=True))
            ends += [(choice["finish_reason"], choice["stop_reason"])] if choice["finish_reason"] else []
    return {"text": text, "ids": ids, "logprobs": logprobs, "ends": ends, "usage": usage}


async def reads(stream: bytes, cuts: Sequence[int]) -> AsyncIterator[bytes]:
    """The stream as the network cuts it, as whole events."""
    whole, ends = WholeEvents(), sorted({min(cut, len(stream)) for cut in cuts} | {len(stream)})
    for begin, end in zip((0, *ends), ends, strict=False):
        await asyncio.sleep(0)
        if events := whole.feed(stream[begin:end]):
            yield events


def respaced(
    stream: bytes, separators: tuple[str, str] = (",", ":"), *, field: bytes = b"data: ", turned: bool = False
) -> bytes:
    """The stream as another server would write it, or as vLLM does. `turned`: names in the other order."""
    events = b""
    for event in split(stream):
        said = Event(event).data
        if said != b"[DONE]":
            said = json.dumps(json.loads(said, object_hook=_turned if turned else None), separators=separators).encode()
        events += field + said + b"\n\n"
    return events


def _turned(value: dict[str, Any]) -> dict[str, Any]:
    return dict(reversed(value.items()))


SPACED: Sequence[Mapping[str, Any]] = [
    {"separators": (", ", ": ")},
    {"separators": (",", " :")},
    {"separators": (", ", "\t:\t"), "turned": True},
    {"separators": (",", ":"), "turned": True},
    {"separators": (",", ":"), "field": b"data:"},
]
"""Ways of other servers to write the same events."""

texts = st.text("ab é😀<\n", max_size=3)
answers = st.lists(st.tuples(st.integers(1, 99), texts), min_size=1, max_size=6)
forms = st.builds(Form, chat=st.booleans(), logprobs=st.booleans(), ids=st.booleans(), usage=st.booleans())
numbers = st.lists(st.integers(0, 6), max_size=6)
