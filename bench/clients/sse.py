"""From the reads of an answer to its tokens: when content came, how it ended, what it counted. Pure.

Runs once per request, when it has ended, so that nothing is decoded between two tokens. An event bears content when a
choice of it has text, reasoning, a refusal or a tool call that is not empty: the role-only event that many servers
begin with is no first token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

SHORTENED_CHARS = 500
"""Of what a server says that is kept."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What an answer was. Times as those of the reads; several events of one read have one time.

    Attributes:
        content_s: one time per event that bears content.
        last_s: of the last event that bears content or says why the answer ended; None without any.
        text: the content, put together. finish_reason: of the last choice that has one; "" without.
        completion_tokens, prompt_tokens: as the server counts them; None where it does not say.
        done: the end has come: `[DONE]` of a stream. error: what an error event says. garbage: what is no answer.
    """

    content_s: tuple[float, ...] = ()
    last_s: float | None = None
    text: str = ""
    finish_reason: str = ""
    completion_tokens: int | None = None
    prompt_tokens: int | None = None
    done: bool = False
    error: str = ""
    garbage: str = ""


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[Any] | None = None

    def bears_content(self) -> bool:
        return bool(self.content or self.reasoning_content or self.reasoning or self.refusal or self.tool_calls)


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    message: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


def read_answer(pieces: Sequence[tuple[float, bytes]], *, stream: bool = True) -> Reading:
    """Reads an answer of status 200 that came in `pieces` of (seconds, bytes), up to an error, garbage or its end."""
    content: list[float] = []
    text: list[str] = []
    last: float | None = None
    finish, usage = "", _Usage()

    def reading(**ended: Any) -> Reading:
        words = "".join(text)
        return Reading(tuple(content), last, words, finish, usage.completion_tokens, usage.prompt_tokens, **ended)

    whole = [] if stream or not pieces else [(pieces[-1][0], b"".join(piece for _, piece in pieces))]
    for at, data in events(pieces) if stream else whole:
        if data == b"[DONE]":
            return reading(done=True)
        try:
            event = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return reading(garbage=f"{error}: {shortened(data)}")
        if event.error is not None:
            return reading(error=shortened(data))
        for choice in event.choices or ():
            delta = choice.delta or choice.message
            if choice.text or (delta is not None and delta.bears_content()):
                content.append(at)
                text.append(choice.text or (delta and delta.content) or "")
                last = at
            if choice.finish_reason:
                finish, last = choice.finish_reason, at
        usage = event.usage or usage
    return reading(done=bool(whole))


def events(pieces: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """Yields the data of each complete event with the time of the read that completed it. Comments are left out."""
    rest, at = b"", 0.0
    for at, piece in pieces:
        rest = (rest + piece).replace(b"\r\n", b"\n")
        *blocks, rest = rest.split(b"\n\n")
        for block in blocks:
            if block.startswith(b"data: ") and b"\n" not in block:
                yield at, block[6:]
            elif data := _data_lines(block.split(b"\n")):
                yield at, data
    if rest.strip() and not rest.lstrip().startswith((b"data:", b"event:", b":", b"id:", b"retry:")):
        yield at, rest  # no event at all: decoding will say so


def _data_lines(lines: Sequence[bytes]) -> bytes:
    """Returns the data of an event of several lines; of lines that no event has, themselves."""
    data = [line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:")]
    return b"\n".join(
        data or [line for line in lines if line and not line.startswith((b":", b"event:", b"id:", b"retry:"))]
    )


def shortened(data: bytes) -> str:
    """Returns what a server said, cut to `SHORTENED_CHARS`."""
    return data[: 4 * SHORTENED_CHARS].decode(errors="replace").strip()[:SHORTENED_CHARS]
