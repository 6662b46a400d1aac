"""What an endpoint says of itself before AISBench loads it: its models, and how its streams begin and end.

AISBench keeps the time of every chunk and of none what was in it. So one small request is sent first, to know how many
chunks come before the first content (a role alone, which AISBench takes for the first token) and after the last (the
usage). An endpoint that fails it would have failed minutes of load.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from bench.clients.answers import events, judge, read_answer
from bench.clients.bodies import streamed
from bench.clients.target import Target
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
    bears = [bool(read_answer([(0.0, b"data: " + data + b"\n\n")]).content_s) for _, data in events(pieces)
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
    response = await target.ask(json.dumps(streamed(body)).encode(), "epd-bench-look", ANSWER_S)
    reading = read_answer(response.pieces or ())
    status = judge(response, reading)
    wrong = status.error
    if response.pieces is None:
        wrong = f"nothing within {ANSWER_S:g} s"
    elif not wrong and reading.completion_tokens is None:
        wrong = "the stream does not end with its usage, which AISBench counts tokens by"
    if wrong:
        raise StageError(
            f"{target.endpoint} does not answer a small request: {status.fault}: {wrong}", stage=str(target.endpoint)
        )
    return shape_of(response.pieces or ())
