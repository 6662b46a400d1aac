"""From the reads of an answer to its tokens, and to what became of the request. Pure; the one place that decides it.

Read once per request, when it has ended, so that nothing is decoded between two tokens. An event bears content when a
choice of it has text, reasoning, a refusal or a tool call that is not empty: the role-only event that many servers
begin with is no first token. Servers fail in ways that clients have counted as success: an error event followed by
`[DONE]`, a stream that ends without one, an answer shorter than `ignore_eos` demands. None of them is one here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from bench.clients.http import Response
from bench.clients.results import Outcome

SHORTENED_CHARS = 500
"""Of what a server says that is kept."""
REFUSALS = frozenset({"status 429", "status 503"})
"""Faults by which a server says that it is overloaded: a measured result, not a run gone wrong."""
UNREACHABLE = "unreachable"
CROWDED = "not sent: too many under way"
ERROR_EVENT = "error event"
CUT = "cut"


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
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    def bears_content(self) -> bool:
        """Tokens that are no text, or half of a character, are content where their ids are asked for."""
        delta = self.delta or self.message
        return bool(self.text or self.token_ids or (delta is not None and delta.bears_content()))


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
            if choice.bears_content():
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


@dataclass(frozen=True, slots=True)
class ResponseStatus:
    """`fault` is what errors are counted by; `error` is what the server said."""

    outcome: Outcome
    fault: str = ""
    error: str = ""


OK = ResponseStatus(Outcome.OK)


def judge(
    response: Response, reading: Reading | None, stream: bool = True, expected_tokens: int | None = None
) -> ResponseStatus:
    """Judges an answer that has come, or broken off by itself.

    Args:
        reading: None where the body was not kept: it is then judged by its end alone.
        expected_tokens: that the request asked for with `ignore_eos`; None where any number is right.
    """
    if response.garbage:
        return ResponseStatus(Outcome.ERROR, "garbage", response.garbage)
    if response.status == 0:
        return ResponseStatus(Outcome.ERROR, "broken", "the connection was lost before an answer began")
    if response.status != 200:
        return ResponseStatus(Outcome.ERROR, f"status {response.status}", shortened(response.tail))
    if reading is None or not (stream or response.ended_s):
        return _by_its_end(response, stream=stream)
    return judge_reading(reading, expected_tokens, cut="ended without [DONE]" if response.ended_s else "was cut off")


def judge_reading(
    reading: Reading, expected_tokens: int | None = None, cut: str = "ended without [DONE]"
) -> ResponseStatus:
    """Judges what an answer of status 200 says. `cut`: what became of one without an end."""
    if reading.garbage:
        return ResponseStatus(Outcome.ERROR, "garbage", reading.garbage)
    if reading.error:
        return ResponseStatus(Outcome.ERROR, ERROR_EVENT, reading.error)
    if not reading.done:
        return ResponseStatus(Outcome.TRUNCATED, CUT, f"the answer {cut} after {len(reading.content_s)} events")
    if not reading.content_s:
        return ResponseStatus(Outcome.ERROR, "empty", "a whole answer without any content")
    tokens = reading.completion_tokens
    if expected_tokens is not None and tokens is not None and tokens < expected_tokens:
        short = f"{tokens} tokens of {expected_tokens}, finish_reason {reading.finish_reason!r}"
        return ResponseStatus(Outcome.TRUNCATED, "short", short)
    return OK


def _by_its_end(response: Response, *, stream: bool) -> ResponseStatus:
    if response.whole(stream=stream):
        return OK
    if stream and b'"error"' in response.tail and b"[DONE]" not in response.tail:
        return ResponseStatus(Outcome.ERROR, ERROR_EVENT, shortened(response.tail))
    return ResponseStatus(Outcome.TRUNCATED, CUT, shortened(response.tail))
