"""How an answer ended, read from the last of it as it went to the client: why, and with how many tokens. Pure."""

from __future__ import annotations

import msgspec
from msgspec import Struct

BLANK_LINE = b"\n\n"


class AnswerEnd(Struct, frozen=True):
    """`finish`: OpenAI's `finish_reason`, of `/v1/responses` its `status`; "" where neither is said. Counts of tokens
    are None where the stage did not say them: of a stream, unless `stream_options.include_usage` asks for them."""

    finish: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


class _Choice(Struct):
    finish_reason: str | None = None


class _Details(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    """Of chats and completions, or of responses, which have other names for the same."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None


class _Answer(Struct):
    """A whole answer or an event of a stream; of responses the event has the answer in it."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    status: str | None = None
    response: _Answer | None = None


_DECODER = msgspec.json.Decoder(_Answer)


def answer_end(last: bytes) -> AnswerEnd:
    """Args:
    last: a whole answer as JSON, or the last whole events of a stream.
    """
    finish, found = "", None
    for event in [last] if last.startswith(b"{") else reversed(last.split(BLANK_LINE)):
        try:
            answer = _DECODER.decode(event[event.find(b"{") :])
        except msgspec.MsgspecError:  # no event of an answer: [DONE], a comment
            continue
        answer = answer.response or answer
        found = found or answer.usage
        finish = next((one.finish_reason for one in reversed(answer.choices) if one.finish_reason), answer.status or "")
        if finish:
            break
    usage = found or _Usage()
    details = usage.prompt_tokens_details or usage.input_tokens_details or _Details()
    if usage.prompt_tokens is None:
        return AnswerEnd(finish, usage.input_tokens, usage.output_tokens, details.cached_tokens)
    return AnswerEnd(finish, usage.prompt_tokens, usage.completion_tokens, details.cached_tokens)
