"""Traffic that changes: in phases of so many requests a second of each kind, as Poisson arrivals. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from epd_serve.traffic import Item, Request

PICTURES = 4
PICTURE_TOKENS, PICTURE_SIZE = 391, (802, 652)
QUESTION_TOKENS = 32
SHORT, LONG = 8, 256
"""Tokens of an answer about pictures, and of one to a text."""


@dataclass(frozen=True)
class Phase:
    """Requests a second: with four pictures and a short answer, and of text alone with a long one."""

    seconds: float
    text_rps: float
    media_rps: float


def requests_of(phases: Iterable[Phase], seed: int) -> list[Request]:
    chance, at_s, drawn = random.Random(seed), 0.0, list[tuple[float, bool]]()
    for phase in phases:
        for media, rate in ((False, phase.text_rps), (True, phase.media_rps)):
            due_s = chance.expovariate(rate) if rate else phase.seconds
            while due_s < phase.seconds:
                drawn.append((at_s + due_s, media))
                due_s += chance.expovariate(rate)
        at_s += phase.seconds
    return [_request(number, *one) for number, one in enumerate(sorted(drawn))]


def _request(number: int, at_s: float, media: bool) -> Request:
    items: Sequence[Item] = [Item(PICTURE_TOKENS, *PICTURE_SIZE)] * PICTURES if media else ()
    prompt_tokens = QUESTION_TOKENS + sum(item.tokens for item in items)
    return Request(str(number), at_s, prompt_tokens, SHORT if media else LONG, tuple(items))
