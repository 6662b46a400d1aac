"""What an endpoint says of itself before AISBench loads it: its models, and how its streams begin and end.

AISBench keeps the time of every chunk and of none what was in it. So one small request is sent first, to know how many
chunks come before the first content (a role alone, which AISBench takes for the first token) and after the last (the
usage). An endpoint that fails it would have failed minutes of load.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass

from bench.client.bodies import streamed
from bench.client.sse import events, read_stream, said
from bench.client.target import Target
from epd_serve.errors import StageError

TOKENS = 3
ANSWER_S = 120.0


@dataclass(frozen=True, slots=True)
class Shape:
    """Chunks of an answer that are no tokens: `before` the first content and `after` the last."""

    before: int = 0
    after: int = 1


def shape_of(pieces: Iterable[tuple[float, bytes]]) -> Shape:
    """Of a whole answer with content."""
    bears = [bool(read_stream([(0.0, b"data: " + data + b"\n\n")]).content_s) for _, data in events(pieces)
             if data != b"[DONE]"]  # fmt: skip
    return Shape(bears.index(True), bears[::-1].index(True))


async def look(target: Target, model: str) -> Shape:
    """Ask for a few tokens.

    Raises:
        StageError: nobody is there, or what comes is no answer to that.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Say something."}],
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    answer = await target.ask(json.dumps(streamed(body)).encode(), "epd-bench-look", ANSWER_S)
    what = f"{target.endpoint} does not answer a small request"
    if answer.garbage:
        raise StageError(f"{what} but with garbage: {answer.garbage}", stage=str(target.endpoint))
    if answer.status and answer.status != 200:
        raise StageError(f"{what}: status {answer.status}: {said(answer.tail)}", stage=str(target.endpoint))
    if answer.kept is None:
        raise StageError(f"{what} within {ANSWER_S:g} s", stage=str(target.endpoint))
    if not answer.status:
        raise StageError(f"{what}: it closes the connection", stage=str(target.endpoint))
    reading = read_stream(answer.kept.pieces)
    wrong = reading.error or reading.garbage
    if not wrong and not reading.done:
        wrong = f"the stream {'ended without [DONE]' if answer.ended else 'was cut off'}"
    if not wrong and not reading.content_s:
        wrong = "the stream has no content"
    if not wrong and reading.completion_tokens is None:
        wrong = "the stream does not end with its usage, which AISBench counts tokens by"
    if wrong:
        raise StageError(f"{what} properly: {wrong}", stage=str(target.endpoint))
    return shape_of(answer.kept.pieces)


def run_look(target: Target, model: str) -> Shape:
    return asyncio.run(look(target, model))
