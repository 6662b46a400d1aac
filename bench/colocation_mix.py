"""What `epd-bench colocation` sends, and what one round of it took: the same requests to each layout, in a closed loop.

A round's throughput is its output tokens over the time from its first request to its last answer. Time per output
token (TPOT) is (end - first byte) / (tokens - 1) of a request; vLLM's role comes with the first token.
"""

from __future__ import annotations

import base64
import functools
import io
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from PIL.Image import Image

from bench.flow_process import FlowGenerator
from bench.flows import GOOD, Flow, Outcome
from bench.processes import cpu_seconds
from bench.scenario_bodies import text
from bench.served import Served
from epd_serve.demo.pictures import draw, scene
from epd_serve.errors import StageError

QUESTION = "What is in the picture?"
EVERY_TOKEN = {"ignore_eos": True, "return_token_ids": True}
"""Answers as long as asked for, and an event for each token: random weights also say tokens that have no text, and of
those vLLM sends nothing before the answer ends unless the client wants their ids."""

ROUND_S = 300.0
DRAWN = 4


@dataclass(frozen=True)
class Mix:
    """The requests of a round.

    Attributes:
        requests: how many, of which `pictures` have a picture of side x side pixels that nothing else shows.
        answer: tokens of every answer, exactly. prompt: tokens of a text, about.
        at_once: requests under way.
    """

    requests: int
    pictures: int
    at_once: int
    answer: int
    side: int = 640
    prompt: int = 64

    def bodies(self, model: str, seed: int) -> list[dict[str, Any]]:
        """The same ones for the same seed, with pictures and texts in a drawn order."""
        kinds = [place < self.pictures for place in range(self.requests)]
        random.Random(seed).shuffle(kinds)
        numbers = range(seed * self.requests, (seed + 1) * self.requests)
        return [self._body(model, number, shown=shown) for number, shown in zip(numbers, kinds, strict=True)]

    def _body(self, model: str, number: int, *, shown: bool) -> dict[str, Any]:
        body = text(model, tokens=self.prompt, answer=self.answer, stream=True, seed=number)
        if shown:
            image = {"type": "image_url", "image_url": {"url": numbered_picture(number, self.side)}}
            parts = [image, {"type": "text", "text": QUESTION}]
            body["messages"] = [{"role": "user", "content": parts}]
        return body | EVERY_TOKEN


@dataclass(frozen=True)
class Round:
    """One layout's round. Times in seconds, one per request, in the order of their ends.

    Attributes:
        cpu_s: CPU time of the layout's processes. others_cpu_s: of the other layouts', which nobody asked anything.
    """

    name: str
    turn: int
    seconds: float
    tokens: int
    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]
    cpu_s: float = 0.0
    others_cpu_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    def values(self) -> dict[str, float]:
        """What rounds are compared by."""
        return {
            "tput": self.tokens_per_s,
            "tpot": statistics.fmean(self.tpot_s),
            "ttft": statistics.fmean(self.ttft_s),
        }

    def row(self) -> dict[str, Any]:
        """For the record."""
        return {
            "layout": self.name,
            "round": self.turn,
            "seconds": round(self.seconds, 4),
            "tokens_per_s": round(self.tokens_per_s, 3),
            "ttft_ms": [round(one * 1e3, 2) for one in self.ttft_s],
            "tpot_ms": [round(one * 1e3, 3) for one in self.tpot_s],
            "cpu_s": round(self.cpu_s, 3),
            "others_cpu_s": round(self.others_cpu_s, 3),
        }


@dataclass(frozen=True)
class Contestant:
    """A layout that is up, and what it is called."""

    name: str
    launch: Served = field(compare=False)


def numbered_picture(number: int, side: int) -> str:
    """A picture that no other number gives, as a data URL: one of a few, its number written in its corner pixels.

    To draw a picture takes as long as to encode a small one, and one core of two is not to be busy with that.
    """
    drawn = _drawn(number % DRAWN, side).copy()
    for bit in range(24):
        drawn.putpixel((bit, 0), (255, 255, 255 - (number >> bit & 1)))
    data = io.BytesIO()
    drawn.save(data, "PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


@functools.cache
def _drawn(seed: int, side: int) -> Image:
    return draw(scene(seed), side)


def play(
    generator: FlowGenerator, who: Contestant, others: Sequence[Contestant], mix: Mix, seed: int, turn: int
) -> Round:
    """Send the mix of `seed` to one layout.

    Raises:
        StageError: an answer was not good; compared are only complete rounds.
    """
    flow = Flow("mix", mix.bodies(who.launch.model, seed), at_once=mix.at_once, count=mix.requests)
    idle = [other for other in others if other is not who]
    before = [_cpu_s(one) for one in (who, *idle)]
    run = generator.run(who.launch.url, [flow], within_s=ROUND_S, limit_s=ROUND_S)
    spent = [_cpu_s(one) - at for one, at in zip((who, *idle), before, strict=True)]
    return round_of(who.name, turn, run.outcomes, mix.answer, spent[0], sum(spent[1:]))


def round_of(
    name: str, turn: int, outcomes: Sequence[Outcome], answer: int, cpu_s: float = 0.0, others_cpu_s: float = 0.0
) -> Round:
    """Pure. Raises StageError when an answer was not good."""
    bad = [one for one in outcomes if one.verdict != GOOD]
    if bad or not outcomes:
        said = f"{bad[0].verdict}: {bad[0].said}" if bad else "nothing was sent"
        raise StageError(f"{name}: {len(bad)} of {len(outcomes)} answers are not good, the first: {said}", stage=name)
    return Round(
        name,
        turn,
        max(one.ended for one in outcomes) - min(one.due for one in outcomes),
        answer * len(outcomes),
        tuple(one.first_s for one in outcomes),
        tuple(tpot_s(one, answer) for one in outcomes),
        cpu_s,
        others_cpu_s,
    )


def tpot_s(one: Outcome, tokens: int) -> float:
    return (one.ended - one.first) / (tokens - 1)


def _cpu_s(one: Contestant) -> float:
    return sum(cpu_seconds(one.launch.cpu_parts).values())


def tokens_of(client: httpx.Client, who: Contestant, body: dict[str, Any], answer: int) -> list[int]:
    """The token ids of one answer, asked for alone. Raises StageError unless there are exactly `answer`."""
    asked = {**body, "stream": False}
    reply = client.post(f"{who.launch.url}/v1/chat/completions", json=asked)
    if reply.status_code != 200:
        raise StageError(f"{who.name} answers {reply.status_code}: {reply.text[:500]}", stage=who.name)
    found: list[int] = reply.json()["choices"][0]["token_ids"]
    if len(found) != answer:
        raise StageError(f"{who.name}: {len(found)} tokens instead of {answer}", stage=who.name)
    return found
