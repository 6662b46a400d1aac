"""The answer to one request, written as vLLM 0.32 writes it: one JSON object, or server-sent events token by token.

Owns the shape. When a token comes is the engine's business; `token` is called for each of each choice, in any order of
choices. Where a stream is plain, its events are put together from bytes made once.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import msgspec

from epd_serve.sim.choice import Choice
from epd_serve.sim.http import Exchange
from epd_serve.sim.prompts import Prompt
from epd_serve.sim.request_params import RequestParams
from epd_serve.sim.tokens import WORDS

_json = msgspec.json.encode
_WORD_JSON = {one: _json(one) for one in WORDS}


class Answer:
    """One per request. Tokens that are computed with the prompt come with the first token after them, as in vLLM.

    Raises:
        ValueError: it cannot go on after the tokens that were given.

    Attributes:
        choices: those of the first prompt first. extras: fields for the stages' proxy, e.g. `kv_transfer_params`.
    """

    def __init__(self, params: RequestParams, exchange: Exchange) -> None:
        self.extras: dict[str, Any] = {}
        self._params = params
        self._exchange = exchange
        self._created = int(time.time())
        self.choices = [
            Choice(prompt.seed, at, limit=params.limit, bounded=params.bounded, stops=params.stops)
            for prompt in params.prompts
            for at in range(params.n)
        ]
        for index, choice in enumerate(self.choices):
            choice.index = index
        self._open = len(self.choices)
        self._generated = [0] * len(self.choices)
        self._begun = len(params.prefilled)
        if params.given and not self.choices[0].begins_with(params.given, whole=params.replay):
            raise ValueError("goes_on_after is not what this answer begins with")

    def begin(self) -> None:
        """The request is taken in: nothing is said before the first token."""

    def token(self, index: int, number: int, last: bool) -> None:
        """Choice `index` has its token `number` (from 1 on)."""
        self._generated[index] = number
        if self._params.stream:
            self._stream(self.choices[index], number, last)
        self._open -= last
        if not self._open:
            self._finish()

    # --- in one piece ---------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        if self._params.stream:
            if self._params.include_usage:
                self._exchange.event(_data({**self._head(), "choices": [], "usage": self._usage()}))
            self._exchange.event(b"data: [DONE]\n\n")
            self._exchange.finish()
            return
        kind = "chat.completion" if self._params.chat else "text_completion"
        shape = self._message_choice if self._params.chat else self._text_choice
        body: dict[str, Any] = {
            "id": self._params.id,
            "object": kind,
            "created": self._created,
            "model": self._params.model,
            "choices": [shape(choice) for choice in self.choices],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": {**self._usage(), "prompt_tokens_details": None},
        }
        if self._params.chat:
            body["prompt_logprobs"] = None
            body["prompt_token_ids"] = self._params.prompts[0].ids if self._params.token_ids else None
        body["kv_transfer_params"] = None
        self._exchange.respond_json({**body, **self.extras})

    def _message_choice(self, choice: Choice) -> dict[str, Any]:
        params, tool = self._params, self._params.tool
        text = None if tool else choice.text(choice.tokens)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        message |= {"annotations": None, "audio": None, "function_call": None, "reasoning": None}
        message["tool_calls"] = [self._call(choice)] if tool else []
        return {
            "index": choice.index,
            "message": message,
            "logprobs": None if params.logprobs is None else choice.chat_logprobs(0, choice.tokens, params.logprobs),
            "finish_reason": "tool_calls" if tool else choice.finish,
            "stop_reason": choice.stop,
            "token_ids": self._ids(choice, 0, choice.tokens),
        }

    def _text_choice(self, choice: Choice) -> dict[str, Any]:
        params, prompt = self._params, self._prompt(choice)
        echoed = prompt.text.decode(errors="replace") if params.echo else ""
        return {
            "index": choice.index,
            "text": echoed + choice.text(choice.tokens),
            "logprobs": None
            if params.logprobs is None
            else choice.completion_logprobs(0, choice.tokens, params.logprobs),
            "finish_reason": choice.finish,
            "stop_reason": choice.stop,
            "token_ids": self._ids(choice, 0, choice.tokens),
            "prompt_logprobs": None,
            "prompt_token_ids": prompt.ids if params.token_ids else None,
        }

    # --- as events ------------------------------------------------------------------------------------------------

    def _stream(self, choice: Choice, number: int, last: bool) -> None:
        if not self._exchange.streaming:
            self._exchange.start_events()
            if self._params.chat:
                self._open_choices()
        first = 0 if number == self._begun + 1 else number - 1
        if self._params.tool and not (last or not first):
            return
        if self._plain and first and not last:
            self._exchange.event(self._plain_event(choice, first))
            return
        event = {**self._head(), "choices": [self._stream_choice(choice, first, number, last)]}
        if self._params.continuous_usage:
            event["usage"] = self._usage()
        self._exchange.event(_data(event))

    def _open_choices(self) -> None:
        for choice in self.choices:
            delta = {"role": "assistant", "content": ""}
            event: dict[str, Any] = self._head()
            event["choices"] = [{"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}]
            event["prompt_token_ids"] = self._params.prompts[0].ids if self._params.token_ids else None
            if self._params.continuous_usage:
                event["usage"] = self._usage()
            self._exchange.event(_data(event))

    @functools.cached_property
    def _plain(self) -> bool:
        params = self._params
        return params.logprobs is None and not (params.continuous_usage or params.tool or params.echo)

    def _plain_event(self, choice: Choice, at: int) -> bytes:
        """Of token `at`, from 0 on."""
        before, between, after = self._parts[choice.index]
        ids = b"[%d]" % choice.token_id(at) if self._params.token_ids else b"null"
        return before + _piece_json(choice.piece(at)) + between + ids + after

    @functools.cached_property
    def _parts(self) -> list[tuple[bytes, bytes, bytes]]:
        """A later event of each choice, cut where its text and its token ids stand."""
        text, ids, parts = "\0text\0", "\0ids\0", []
        for choice in self.choices:
            entry = self._stream_choice(choice, 1, 2, last=False) | {"token_ids": ids}
            (entry["delta"] if self._params.chat else entry)["content" if self._params.chat else "text"] = text
            before, _, rest = _data({**self._head(), "choices": [entry]}).partition(_json(text))
            between, _, after = rest.partition(_json(ids))
            parts.append((before, between, after))
        return parts

    def _stream_choice(self, choice: Choice, first: int, number: int, last: bool) -> dict[str, Any]:
        """Of the tokens from `first` to before `number`, from 0 on."""
        params, span = self._params, (first, number)
        piece = "".join(map(choice.piece, range(*span)))
        entry: dict[str, Any] = {"index": choice.index}
        if params.chat:
            entry["delta"] = {"content": piece}
            if params.tool:
                entry["delta"] = {"tool_calls": [{**self._call(choice), "index": 0}]} if not first else {}
            entry["logprobs"] = None if params.logprobs is None else choice.chat_logprobs(*span, params.logprobs)
        else:
            echoed = self._prompt(choice).text.decode(errors="replace") if params.echo and not first else ""
            entry["text"] = echoed + piece
            entry["logprobs"] = None if params.logprobs is None else choice.completion_logprobs(*span, params.logprobs)
        entry["finish_reason"] = None
        if last:
            entry["finish_reason"] = "tool_calls" if params.tool else choice.finish
        if last or not params.chat:
            entry["stop_reason"] = choice.stop if last else None
        if not params.chat:
            entry["prompt_token_ids"] = self._prompt(choice).ids if params.token_ids and not first else None
        entry["token_ids"] = self._ids(choice, *span)
        return entry

    def _head(self) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._params.chat else "text_completion"
        return {"id": self._params.id, "object": kind, "created": self._created, "model": self._params.model}

    # --- parts ----------------------------------------------------------------------------------------------------

    def _usage(self) -> dict[str, Any]:
        prompt, completion = sum(one.tokens for one in self._params.prompts), sum(self._generated)
        return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}

    def _prompt(self, choice: Choice) -> Prompt:
        return self._params.prompts[choice.index // self._params.n]

    def _ids(self, choice: Choice, first: int, last: int) -> list[int] | None:
        return [choice.token_id(number) for number in range(first, last)] if self._params.token_ids else None

    def _call(self, choice: Choice) -> dict[str, Any]:
        name = f"chatcmpl-tool-{choice.index}"
        return {"id": name, "type": "function", "function": {"name": self._params.tool, "arguments": "{}"}}


def _data(event: dict[str, Any]) -> bytes:
    return b"data: " + _json(event) + b"\n\n"


def _piece_json(piece: str) -> bytes:
    return _WORD_JSON.get(piece) or _json(piece)
