"""What clients of `/v1/messages` get of a chat's answer: Anthropic's JSON, events and errors. No I/O.

A stage answers a chat (`proxy/fields/messages.py`); each form below is what vLLM 0.32 makes of one
(`entrypoints/anthropic/serving.py`).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, field

from epd_serve.errors import EpdError
from proxy import strict_json
from proxy.stages.sse import DONE, split

Json = dict[str, Any]

ERROR_TYPES = {413: "request_too_large", 503: "overloaded_error"}
"""Anthropic's types of errors that OpenAI has no type for, by HTTP status."""
STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}


class _Details(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None

    @property
    def public(self) -> Json:
        """Tokens that a prefix cache had are no input tokens to Anthropic, but counted beside them."""
        cached = self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details is not None else None
        usage = {"input_tokens": self.prompt_tokens - (cached or 0), "output_tokens": self.completion_tokens or 0}
        return usage if cached is None else {**usage, "cache_read_input_tokens": cached}


class _Function(Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(Struct):
    index: int = 0
    id: str | None = None
    function: _Function = field(default_factory=_Function)


class _Said(Struct):
    """A message, or what a chunk adds to one."""

    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(Struct):
    message: _Said | None = None
    delta: _Said | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _Chat(Struct):
    """An answer in one piece, or a chunk of one. `error`: ours (`proxy.errors.error_event`), which ends a stream."""

    id: str = ""
    model: str = ""
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: dict[str, Any] | None = None


class _Count(Struct):
    count: int


_CHAT = msgspec.json.Decoder(_Chat)
_COUNT = msgspec.json.Decoder(_Count)
_T = TypeVar("_T")


class UnreadableAnswerError(EpdError):
    """A stage answered 200, and what it said is not what vLLM would say."""

    status = 502
    code = "stage_failed"

    def __init__(self) -> None:
        super().__init__("a stage's answer cannot be read")


class MessageForm:
    """Of one answer to `/v1/messages`. Raises UnreadableAnswerError."""

    def __init__(self) -> None:
        self._stream = _Stream()

    def whole(self, status: int, body: bytes) -> bytes:
        return _error(body, status) if status >= 400 else strict_json.encode(message_of(body))

    def events(self, events: bytes) -> bytes:
        return b"".join(event for chunk in split(events) for event in self._stream.events(chunk))


class CountForm:
    """Of one answer to `/v1/messages/count_tokens`, which comes in one piece."""

    def whole(self, status: int, body: bytes) -> bytes:
        if status >= 400:
            return _error(body, status)
        return strict_json.encode({"input_tokens": _decoded(body, _COUNT).count})

    def events(self, events: bytes) -> bytes:
        raise AssertionError("tokenizers answer in one piece")


def _error(body: bytes, status: int) -> bytes:
    return strict_json.encode(error_of(strict_json.decode(body)["error"], status))


def error_of(error: Mapping[str, Any], status: int = 0) -> Json:
    """Anthropic's error. It has no field for what names the field at fault, so the message does. `status`: where it is
    known: a stream has begun with 200."""
    kind = ERROR_TYPES.get(status, error["type"])
    message, param = error["message"], error["param"]
    if param and param not in message:
        message = f"{param}: {message}"
    return {"type": "error", "error": {"type": "api_error" if kind == "server_error" else kind, "message": message}}


def message_of(body: bytes) -> Json:
    """A chat's answer as a message. The arguments of a call that `max_tokens` cut off are no object: it has none."""
    chat = _decoded(body, _CHAT)
    if len(chat.choices) != 1:
        raise UnreadableAnswerError
    choice = chat.choices[0]
    said = choice.message or _Said()
    content: list[Json] = []
    if said.reasoning:
        content.append({"type": "thinking", "thinking": said.reasoning, "signature": _signature()})
    if said.content:
        content.append({"type": "text", "text": said.content})
    calls = said.tool_calls or []
    inputs = [_object(call.function.arguments) for call in calls]
    for call, given in zip(calls, inputs, strict=True):
        content.append({"type": "tool_use", "id": call.id, "name": call.function.name, "input": given or {}})
    return {
        **_head(chat),
        "content": content or [{"type": "text", "text": ""}],  # clients look into the first block
        **_end(choice, called=bool(calls), complete=bool(calls) and None not in inputs),
        "usage": (chat.usage or _Usage()).public,
    }


class _Stream:
    """Makes events of chunks, each as it comes. A block is open from its first piece to the first of another one."""

    def __init__(self) -> None:
        self._begun = False
        self._kind = ""  # of the block that is open
        self._index = -1  # of the block that was opened last
        self._call = -1  # of the call that it is, by the chat
        self._arguments = ""
        self._later = ""  # text that came within a call
        self._last = _Choice()
        self._usage = _Usage()

    def events(self, chunk: bytes) -> Iterator[bytes]:
        """What one event of a chat becomes."""
        data = chunk.partition(b":")[2].strip()
        if chunk.startswith(b":"):
            yield chunk
        elif data == DONE:
            yield from self._end()
            yield _event("message_stop")
        else:
            chat = _decoded(data, _CHAT)
            if chat.error is not None:
                yield _event(**error_of(chat.error))
                return
            self._usage = chat.usage or self._usage
            if not self._begun:
                self._begun = True
                message = {**_head(chat), "content": [], "stop_reason": None, "stop_sequence": None}
                yield _event("message_start", message={**message, "usage": self._usage.public})
            for choice in chat.choices:
                yield from self._said(choice.delta or _Said())
                if choice.finish_reason is not None:
                    self._last = choice

    def _said(self, said: _Said) -> Iterator[bytes]:
        if said.reasoning:
            yield from self._piece("thinking", said.reasoning)
        if said.content and self._kind == "tool_use":
            self._later += said.content  # a call is one block, however its pieces come
        elif said.content:
            yield from self._piece("text", said.content)
        for call in said.tool_calls or ():
            if call.index != self._call and call.function.name:
                yield from self._close()
                self._call, self._arguments = call.index, ""
                yield self._open({"type": "tool_use", "id": call.id, "name": call.function.name, "input": {}})
            if call.function.arguments and call.index == self._call and self._kind == "tool_use":
                self._arguments += call.function.arguments
                yield self._delta(type="input_json_delta", partial_json=call.function.arguments)

    def _piece(self, kind: str, text: str) -> Iterator[bytes]:
        if self._kind != kind:
            yield from self._close()
            yield self._open({"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})})
        yield self._delta(**{"type": f"{kind}_delta", kind: text})

    def _open(self, block: Json) -> bytes:
        self._kind, self._index = block["type"], self._index + 1
        return _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, **delta: Any) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> Iterator[bytes]:
        """End the block that is open, and say the text that came within it."""
        if not self._kind:
            return
        if self._kind == "thinking":
            yield self._delta(type="signature_delta", signature=_signature())
        self._kind = ""
        yield _event("content_block_stop", index=self._index)
        if self._later:
            text, self._later = self._later, ""
            yield from self._piece("text", text)
            yield from self._close()

    def _end(self) -> Iterator[bytes]:
        yield from self._close()
        called = self._call >= 0
        delta = _end(self._last, called=called, complete=called and _object(self._arguments) is not None)
        yield _event("message_delta", delta=delta, usage=self._usage.public)


def _head(chat: _Chat) -> Json:
    return {
        "id": f"msg_{chat.id.removeprefix('chatcmpl-')}",
        "type": "message",
        "role": "assistant",
        "model": chat.model,
    }


def _end(choice: _Choice, *, called: bool, complete: bool) -> Json:
    """Why it ended. `called`: it has called tools; `complete`: all of each call is there. A call that a stop text cut
    off must not be made, so it does not count then."""
    reason, text = STOP_REASONS.get(choice.finish_reason or "stop", "end_turn"), choice.stop_reason
    if reason != "max_tokens":
        if isinstance(text, str) and not complete:
            return {"stop_reason": "stop_sequence", "stop_sequence": text}
        reason = "tool_use" if called else reason
    return {"stop_reason": reason, "stop_sequence": None}


def _object(arguments: str | None) -> Json | None:
    """The arguments of a call, which may have none; None where they are no object."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _signature() -> str:
    """Clients want one, and send it back with the thoughts; nobody reads it."""
    return secrets.token_hex(16)


def _decoded(raw: bytes, decoder: msgspec.json.Decoder[_T]) -> _T:
    try:
        return decoder.decode(raw)
    except ValueError as error:  # msgspec's are
        raise UnreadableAnswerError from error


def _event(type: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (type.encode(), strict_json.encode({"type": type, **fields}))
