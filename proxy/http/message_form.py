"""What clients of `/v1/messages` get of a chat's answer: Anthropic's JSON, events and errors. No I/O.

A stage answers a chat (`proxy/fields/messages.py`); what becomes of it is what vLLM 0.32 makes of one
(`entrypoints/anthropic/serving.py`). Whole or streamed, an answer becomes the same events, which make a message.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
from msgspec import Struct, field

from epd_serve.errors import EpdError
from proxy import strict_json
from proxy.stages.sse import DONE, split

Json = dict[str, Any]

ERROR_TYPES = {413: "request_too_large", 503: "overloaded_error"}
"""Anthropic's types of errors that OpenAI has no type for, by HTTP status."""
STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


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
    """`index`: of a call in pieces, which come in chunks; whole ones have none."""

    index: int | None = None
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


class _Answer(Struct):
    """Of a chat in one piece, a chunk of one, or of a tokenizer, which gives a `count`. `error`: ours
    (`proxy.errors.error_event`), which ends a stream."""

    id: str = ""
    model: str = ""
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: dict[str, Any] | None = None
    count: int | None = None


_ANSWER = msgspec.json.Decoder(_Answer)


class UnreadableAnswerError(EpdError):
    """A stage answered 200, and what it said is not what vLLM would say."""

    status = 502
    code = "stage_failed"

    def __init__(self) -> None:
        super().__init__("a stage's answer cannot be read")


class MessageForm:
    """Of one answer to `/v1/messages` or `/v1/messages/count_tokens`. Raises UnreadableAnswerError.

    A block is open from its first piece to the first of another one.
    """

    def __init__(self) -> None:
        self._begun = False
        self._kind = ""  # of the block that is open
        self._index = -1  # of the block that was opened last
        self._call = -1  # of the call that it is, by the chat
        self._arguments = ""
        self._cut = False  # some call has no object for arguments
        self._later = ""  # text that came within a call
        self._last = _Choice()
        self._usage = _Usage()

    def whole(self, status: int, body: bytes) -> bytes:
        """An answer in one piece, or an error."""
        if status >= 400:
            return strict_json.encode(error_of(strict_json.decode(body)["error"], status))
        answer = _decoded(body)
        if answer.count is not None:
            return strict_json.encode({"input_tokens": answer.count})
        if len(answer.choices) != 1:
            raise UnreadableAnswerError
        return strict_json.encode(_message_of([*self._made(answer), *self._end()]))

    def events(self, events: bytes) -> bytes:
        """What these whole events of a chat become."""
        made: list[bytes] = []
        for chunk in split(events):
            name, _, data = chunk.partition(b":")
            if not name:  # a comment
                made.append(chunk)
                continue
            for event in self._end() if data.strip() == DONE else self._made(_decoded(data)):
                made.append(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), strict_json.encode(event)))
        return b"".join(made)

    def _made(self, answer: _Answer) -> Iterator[Json]:
        if answer.error is not None:
            yield error_of(answer.error)
            return
        self._usage = answer.usage or self._usage
        if not self._begun:
            self._begun = True
            yield {"type": "message_start", "message": self._opening(answer)}
        for choice in answer.choices:
            yield from self._said(choice.delta or choice.message or _Said())
            if choice.finish_reason is not None:
                self._last = choice

    def _opening(self, answer: _Answer) -> Json:
        return {
            "id": f"msg_{answer.id.removeprefix('chatcmpl-')}",
            "type": "message",
            "role": "assistant",
            "model": answer.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage.public,
        }

    def _said(self, said: _Said) -> Iterator[Json]:
        if said.reasoning:
            yield from self._piece("thinking", said.reasoning)
        if said.content and self._kind == "tool_use":
            self._later += said.content  # a call is one block, however its pieces come
        elif said.content:
            yield from self._piece("text", said.content)
        for number, call in enumerate(said.tool_calls or ()):
            index, function = number if call.index is None else call.index, call.function
            if index != self._call and function.name:
                yield from self._close()
                self._call, self._arguments = index, ""
                yield self._open({"type": "tool_use", "id": call.id, "name": function.name, "input": {}})
            if function.arguments and index == self._call and self._kind == "tool_use":
                self._arguments += function.arguments
                yield self._delta("input_json", partial_json=function.arguments)

    def _piece(self, kind: str, text: str) -> Iterator[Json]:
        if self._kind != kind:
            yield from self._close()
            yield self._open({"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})})
        yield self._delta(kind, **{kind: text})

    def _open(self, block: Json) -> Json:
        self._kind, self._index = block["type"], self._index + 1
        return {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, kind: str, **fields: str) -> Json:
        return {"type": "content_block_delta", "index": self._index, "delta": {"type": f"{kind}_delta", **fields}}

    def _close(self) -> Iterator[Json]:
        """End the block that is open, and say the text that came within it. Clients want a signature of thoughts, and
        send it back with them; nobody reads it."""
        if not self._kind:
            return
        if self._kind == "thinking":
            yield self._delta("signature", signature=secrets.token_hex(16))
        self._cut |= self._kind == "tool_use" and _object(self._arguments) is None
        self._kind = ""
        yield {"type": "content_block_stop", "index": self._index}
        if self._later:
            text, self._later = self._later, ""
            yield from self._piece("text", text)
            yield from self._close()

    def _end(self) -> Iterator[Json]:
        """Why it ended, too. A call that a stop text cut off must not be made, so it does not count then."""
        yield from self._close()
        called, text = self._call >= 0, self._last.stop_reason
        reason = STOP_REASONS.get(self._last.finish_reason or "", "tool_use" if called else "end_turn")
        stopped = isinstance(text, str) and reason != "max_tokens" and (self._cut or not called)
        delta = {"stop_reason": "stop_sequence" if stopped else reason, "stop_sequence": text if stopped else None}
        yield {"type": "message_delta", "delta": delta, "usage": self._usage.public}
        yield {"type": "message_stop"}


def error_of(error: Mapping[str, Any], status: int = 0) -> Json:
    """Anthropic's error. It has no field for what names the field at fault, so the message does. `status`: where it is
    known: a stream has begun with 200."""
    kind = ERROR_TYPES.get(status, error["type"])
    message, param = error["message"], error["param"]
    if param and param not in message:
        message = f"{param}: {message}"
    return {"type": "error", "error": {"type": "api_error" if kind == "server_error" else kind, "message": message}}


def _message_of(events: Iterable[Json]) -> Json:
    """The message that these events tell of, of at least one block. The arguments of a call that `max_tokens` cut off
    are no object: it has none."""
    message: Json = {}
    for event in events:
        match event:
            case {"message": message}:
                pass
            case {"content_block": block}:
                message["content"].append(block)
            case {"delta": {"partial_json": text}}:
                message["content"][-1]["input"] = _object(text) or {}
            case {"delta": {"type": _, **pieces}}:
                message["content"][-1] |= pieces
            case {"delta": ended}:
                message |= ended
    message["content"] = message["content"] or [{"type": "text", "text": ""}]
    return message


def _object(arguments: str) -> Json | None:
    """The arguments of a call, which may have none; None where they are no object."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _decoded(raw: bytes) -> _Answer:
    try:
        return _ANSWER.decode(raw)
    except ValueError as error:  # msgspec's are
        raise UnreadableAnswerError from error
