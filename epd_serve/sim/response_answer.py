"""The answer to one request of `/v1/responses`, as vLLM 0.32 writes it (`entrypoints/openai/responses`).

One message of text: no reasoning, no tools, nothing kept. As in vLLM, a stream says `response.created` and
`response.in_progress` before there is any token, and ends with `response.completed` whatever the status in it is.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from epd_serve.sim.choice import Choice
from epd_serve.sim.http import Exchange
from epd_serve.sim.request_params import RequestParams

_DEFAULTS: dict[str, Any] = {
    "instructions": None,
    "metadata": None,
    "parallel_tool_calls": True,
    "temperature": 1.0,
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
    "background": False,
    "max_tool_calls": None,
    "previous_response_id": None,
    "prompt": None,
    "reasoning": None,
    "service_tier": "auto",
    "text": None,
    "top_logprobs": None,
    "truncation": "disabled",
    "user": None,
    "presence_penalty": None,
    "frequency_penalty": None,
}
"""Fields of the request that the answer repeats, as they are where the request leaves them out."""


class ResponseAnswer:
    """One per request; to the request's lifecycle the same as `Answer`.

    Attributes:
        choices: the only one. extras: fields for the stages' proxy, e.g. `kv_transfer_params`.
    """

    def __init__(self, params: RequestParams, exchange: Exchange) -> None:
        self.extras: dict[str, Any] = {}
        (prompt,) = params.prompts
        choice = Choice(prompt.seed, 0, limit=params.limit, bounded=params.bounded, stops=params.stops)
        self.choices = [choice]
        self._params, self._exchange = params, exchange
        self._created = int(time.time())
        self._message = f"msg_{params.id.removeprefix('resp_')}"
        self._sent = 0

    def begin(self) -> None:
        """The request is taken in."""
        if self._params.stream:
            response = self._response("in_progress", [], None)
            self._event("response.created", response=response)
            self._event("response.in_progress", response=response)

    def token(self, index: int, number: int, last: bool) -> None:
        """The answer has its token `number` (from 1 on)."""
        choice = self.choices[index]
        if self._params.stream:
            if number == 1:
                self._open_message()
            self._part_event("response.output_text.delta", delta=choice.piece(number - 1), logprobs=[])
        if last:
            self._finish(choice)

    def _finish(self, choice: Choice) -> None:
        text = choice.text(choice.tokens)
        message = self._item("completed", [_text_part(text)])
        status = "incomplete" if choice.finish == "length" else "completed"
        response = {**self._response(status, [message], self._usage(choice.tokens)), **self.extras}
        if not self._params.stream:
            self._exchange.respond_json(response)
            return
        self._part_event("response.output_text.done", text=text, logprobs=[])
        self._part_event("response.content_part.done", part=_text_part(text))
        self._event("response.output_item.done", output_index=0, item=message)
        self._event("response.completed", response=response)
        self._exchange.finish()

    def _open_message(self) -> None:
        self._event("response.output_item.added", output_index=0, item=self._item("in_progress", []))
        self._part_event("response.content_part.added", part=_text_part(""))

    def _part_event(self, kind: str, **fields: Any) -> None:
        self._event(kind, item_id=self._message, output_index=0, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> None:
        data = {"type": kind, "sequence_number": self._sent, **fields}
        self._sent += 1
        self._exchange.event(b"event: %s\ndata: %s\n\n" % (kind.encode(), msgspec.json.encode(data)))

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self._message, "type": "message", "role": "assistant"}
        return {**head, "content": content, "status": status, "phase": None}

    def _response(self, status: str, output: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        params = self._params
        return {
            "id": params.id,
            "object": "response",
            "created_at": self._created,
            "model": params.model,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": output,
            "max_output_tokens": params.limit,
            "usage": usage,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "input_messages": None,
            "output_messages": None,
            **_DEFAULTS,
            **{name: params.body[name] for name in _DEFAULTS if params.body.get(name) is not None},
        }

    def _usage(self, output: int) -> dict[str, Any]:
        prompt = self._params.prompts[0].tokens
        read = {"cached_tokens": 0, "cache_write_tokens": 0, "input_tokens_per_turn": [], "cached_tokens_per_turn": []}
        written: dict[str, Any] = {"reasoning_tokens": 0, "tool_output_tokens": 0}
        written |= {"output_tokens_per_turn": [], "tool_output_tokens_per_turn": []}
        return {
            "input_tokens": prompt,
            "input_tokens_details": read,
            "output_tokens": output,
            "output_tokens_details": written,
            "total_tokens": prompt + output,
        }


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": None}
