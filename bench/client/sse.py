"""From the reads of a streamed answer to its tokens: when content came, how it ended, what it counted. Pure.

Runs once per request, when it has ended, so that nothing is decoded between two tokens. Only what is measured is
decoded. An event bears content when a choice of it has text, reasoning, a refusal or a tool call that is not empty: the
role-only event that many servers begin with is no first token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

SAID_CHARS = 500
"""Of what a server says that is kept."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a stream was. Times as those of the reads; several events of one read have one time.

    Attributes:
        content_s: one time per event that bears content.
        last_s: of the last event that bears content or says why the answer ended; None without any.
        finish_reason: of the last choice that has one; "" without.
        completion_tokens, prompt_tokens: as the server counts them; None where it does not say.
        done: `[DONE]` has come. error: what an error event says. garbage: what is not an OpenAI stream.
    """

    content_s: tuple[float, ...] = ()
    last_s: float | None = None
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


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None

    def bears_content(self) -> bool:
        if self.text:
            return True
        delta = self.delta
        return delta is not None and bool(
            delta.content or delta.reasoning_content or delta.reasoning or delta.refusal or delta.tool_calls
        )


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


def read_stream(pieces: Iterable[tuple[float, bytes]]) -> Reading:
    """The stream that was read in `pieces` of (seconds, bytes). Reading stops at an error, at garbage, at `[DONE]`."""
    content: list[float] = []
    last: float | None = None
    finish, usage = "", _Usage()

    def reading(**ended: Any) -> Reading:
        return Reading(tuple(content), last, finish, usage.completion_tokens, usage.prompt_tokens, **ended)

    for at, data in events(pieces):
        if data == b"[DONE]":
            return reading(done=True)
        try:
            event = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return reading(garbage=f"{error}: {said(data)}")
        if event.error is not None:
            return reading(error=said(data))
        for choice in event.choices or ():
            bears = choice.bears_content()
            if bears:
                content.append(at)
            finish = choice.finish_reason or finish
            if bears or choice.finish_reason:
                last = at
        if event.usage is not None:
            usage = event.usage
    return reading()


def events(pieces: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """The data of each complete event with the time of the read that completed it. Comments are left out."""
    rest = b""
    for at, piece in pieces:
        rest += piece
        if b"\r" in rest:
            rest = rest.replace(b"\r\n", b"\n")
        *blocks, rest = rest.split(b"\n\n")
        for block in blocks:
            if block.startswith(b"data: ") and b"\n" not in block:
                yield at, block[6:]
            elif data := _data_lines(block.split(b"\n")):
                yield at, data
    if rest.strip() and not rest.lstrip().startswith((b"data:", b"event:", b":", b"id:", b"retry:")):
        yield at, rest  # no event at all: decoding will say so


def _data_lines(lines: Sequence[bytes]) -> bytes:
    """The data of an event of several lines; of lines that no event has, themselves."""
    data = [line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:")]
    if data:
        return b"\n".join(data)
    return b"\n".join(line for line in lines if line and not line.startswith((b":", b"event:", b"id:", b"retry:")))


def said(data: bytes) -> str:
    """What a server said, cut to `SAID_CHARS`."""
    return data[: 4 * SAID_CHARS].decode(errors="replace").strip()[:SAID_CHARS]
