"""How an answer ended, read from the last of it as it went to the client: why, and with how many tokens. Pure."""

from __future__ import annotations

import msgspec
from msgspec import Struct

DATA, BLANK_LINE = b"data:", b"\n\n"


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

    @property
    def finish(self) -> str:
        """Of the last choice that says why it ended."""
        for choice in reversed(self.choices):
            if choice.finish_reason is not None:
                return choice.finish_reason
        return self.status or ""


_DECODER = msgspec.json.Decoder(_Answer)
_NOTHING = _Answer()


def answer_end(last: bytes) -> AnswerEnd:
    """Args:
    last: a whole answer as JSON, or the last whole events of a stream.
    """
    if last.startswith(b"{"):
        answer = _read(last)
        return _end(answer.finish, answer.usage)
    usage = None
    for event in reversed(last.split(BLANK_LINE)):
        at = event.find(DATA)
        if at < 0 or event.endswith(b"[DONE]"):
            continue
        answer = _read(event[at + len(DATA) :])
        answer = answer.response or answer
        usage = usage or answer.usage
        if finish := answer.finish:
            return _end(finish, usage)
    return _end("", usage)


def _read(data: bytes) -> _Answer:
    """What it says of its end; nothing where it is no answer."""
    try:
        return _DECODER.decode(data)
    except msgspec.MsgspecError:
        return _NOTHING


def _end(finish: str, usage: _Usage | None) -> AnswerEnd:
    if usage is None:
        return AnswerEnd(finish)
    if usage.prompt_tokens is None:
        prompt, completion, details = usage.input_tokens, usage.output_tokens, usage.input_tokens_details
    else:
        prompt, completion, details = usage.prompt_tokens, usage.completion_tokens, usage.prompt_tokens_details
    return AnswerEnd(finish, prompt, completion, details.cached_tokens if details is not None else None)
