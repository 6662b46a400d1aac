"""Traffic that changes: in phases of so many requests a second of each kind, as Poisson arrivals. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from msgspec.structs import replace as changed

from bench.workloads.generate import Knobs
from bench.workloads.traffic import traffic_of
from bench.workloads.workload import Workload
from epd_serve.image_tokens import Tiled
from epd_serve.traffic import Item, Request

PICTURES = 4
PICTURE_TOKENS, PICTURE_SIZE = 391, (802, 652)
QUESTION_TOKENS = 32
SHORT, LONG = 8, 256
"""Tokens of an answer about pictures, and of one to a text."""


@dataclass(frozen=True)
class Phase:
    """Requests a second: with pictures and a short answer, and of text alone with a long one."""

    seconds: float
    text_rps: float
    media_rps: float


def requests_of(
    phases: Iterable[Phase], seed: int, *, pictures: int = PICTURES, answer_tokens: int = SHORT
) -> list[Request]:
    """Args: pictures: of a request that has some. answer_tokens: to it."""
    rates = [(one.seconds, {"text": one.text_rps, "media": one.media_rps}) for one in phases]
    items = (Item(PICTURE_TOKENS, *PICTURE_SIZE),) * pictures
    prompt_tokens = QUESTION_TOKENS + PICTURE_TOKENS * pictures
    return [
        Request(str(number), at_s, prompt_tokens, answer_tokens, items)
        if kind == "media"
        else Request(str(number), at_s, QUESTION_TOKENS, LONG)
        for number, (at_s, kind) in enumerate(arrivals(rates, seed))
    ]


def arrivals(phases: Iterable[tuple[float, Mapping[str, float]]], seed: int) -> list[tuple[float, str]]:
    """When a request of which kind comes.

    Args:
        phases: seconds, and requests a second by kind.
    """
    chance, at_s, drawn = random.Random(seed), 0.0, list[tuple[float, str]]()
    for seconds, rates in phases:
        for kind, rate in rates.items():
            due_s = chance.expovariate(rate) if rate else seconds
            while due_s < seconds:
                drawn.append((at_s + due_s, kind))
                due_s += chance.expovariate(rate)
        at_s += seconds
    return sorted(drawn)


# --- a day ------------------------------------------------------------------------------------------------------------

DRAWN = 4800
"""Requests of `azure-bursty` that a day draws from."""
MOST_TOKENS = 32_000
"""Of a prompt; a longer one the model does not take."""
PARTS = 144
"""Of the day, in each of which rates stay."""
TEXT_RPS, MEDIA_RPS = 8.0, 8.0
"""At their busiest hours."""
TEXT_PEAK_H, MEDIA_PEAK_H = 14.0, 20.0
NIGHT = 0.3
"""Of the busiest hour's rate, in the quietest one."""
BURST_H, BURST_HOURS, RISE_HOURS = 11.0, 2.0, 2.0
"""When the burst is whole, for how long, and how long it takes to come and to go."""
BURST_TIMES = 4.0
"""As many requests with images then, and of as many images each, as in the bursts of `azure-bursty`."""


def day(hour_s: float, seed: int) -> list[Request]:
    """Azure's traffic as ModServe describes it (§3.2), of one day with an image-driven burst in it (§5.2): text and
    images have their busiest hours apart, and in a burst there are more images in more requests. What the paper shows
    without numbers is our choice, above.

    Args:
        hour_s: in which an hour of the day passes.
    """
    pools = _azure()
    chance = random.Random(seed)
    phases = [(24 * hour_s / PARTS, rates_at(24.0 * (part + 0.5) / PARTS)) for part in range(PARTS)]
    return [
        changed(chance.choice(pools[kind]), id=str(number), at_s=at_s)
        for number, (at_s, kind) in enumerate(arrivals(phases, seed))
    ]


def rates_at(hour: float) -> Mapping[str, float]:
    """Requests a second by pool: of text, with images as usual, and as in a burst."""
    outside = max(0.0, BURST_H - hour, hour - BURST_H - BURST_HOURS)
    burst = max(0.0, 1.0 - outside / RISE_HOURS)
    media = MEDIA_RPS * _of_the_day(hour - MEDIA_PEAK_H)
    return {
        "text": TEXT_RPS * _of_the_day(hour - TEXT_PEAK_H),
        "calm": media * (1.0 - burst),
        "burst": media * BURST_TIMES * burst,
    }


def _of_the_day(hours: float) -> float:
    """Share of the busiest hour's rate, so many hours after it."""
    return NIGHT + (1 - NIGHT) * (1 + math.cos(hours / 24 * 2 * math.pi)) / 2


def _azure() -> Mapping[str, Sequence[Request]]:
    """Requests by pool, with the tokens that InternVL makes of their images."""
    tokens = Tiled(side=448, tokens_each=256, least=1, most=12, thumbnail=True).tokens
    pools: dict[str, list[Request]] = {"text": [], "calm": [], "burst": []}
    for one in islice(Workload("azure-bursty", 1, Knobs(0), sizes_alone=True).endless(), DRAWN):
        request = traffic_of(replace(one, arrival_s=0.0), tokens)
        if request.prompt_tokens <= MOST_TOKENS:
            pools["text" if not request.items else "calm" if one.pace < 1 else "burst"].append(request)
    return pools
