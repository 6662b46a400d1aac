"""What a plan is for: traffic that was recorded, or a shape of it in one line. Pure but for reading the recording.

recorded:FILE                        what a deployment served (`epd_serve/traffic.py`)
images=1@802x652,text=32,output=128  one image a request; a number may be a range, each in it as likely: images=0-3
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean

from msgspec.structs import replace as changed

from epd_serve.errors import ConfigError
from epd_serve.image_tokens import ImageTokens, tiles_of
from epd_serve.traffic import Item, Request, read_traffic

RECORDED = "recorded:"
SEEDS = 10
"""Places from which a recording can begin."""
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_IMAGES = re.compile(r"(\d+(?:-\d+)?)@(\d+)x(\d+)")


@dataclass(frozen=True)
class Work:
    """Of a request on average: what shares of devices and bounds of rates are worked out from (HydraInfer §4.4).

    Attributes:
        items: how many. item_tokens: of all of them. prompt_tokens: with them. output_tokens: of the answer.
    """

    items: float
    item_tokens: float
    prompt_tokens: float
    output_tokens: float


@dataclass(frozen=True)
class Workload:
    """Requests, as many as are wanted.

    Attributes:
        name: as it was asked for.
        recorded: in the order of their arrival; empty for a shape.
        images, text, output: of a shape, the least and the most of each; size: of its images in pixels.
        tokens: the model's rule for an image.
    """

    name: str
    tokens: ImageTokens
    recorded: Sequence[Request] = ()
    images: tuple[int, int] = (0, 0)
    size: tuple[int, int] = (0, 0)
    text: tuple[int, int] = (32, 32)
    output: tuple[int, int] = (128, 128)

    @property
    def rate_rps(self) -> float | None:
        """Of a recording, its own; None of a shape, which has none."""
        if len(self.recorded) < 2:
            return None
        span_s = self.recorded[-1].at_s - self.recorded[0].at_s
        return (len(self.recorded) - 1) / span_s if span_s > 0 else None

    def at(self, rate_rps: float, count: int, seed: int) -> list[Request]:
        """`count` requests, so many a second. A shape's come as Poisson arrivals; a recording's keep their order, their
        bursts and their sessions, go on from another place with each seed, and begin again at their end."""
        chance = random.Random(f"{self.name}/{seed}")
        if self.recorded:
            return self._again(rate_rps, count, seed * len(self.recorded) // SEEDS % len(self.recorded))
        at_s, made = 0.0, []
        image = (self._image(),) if self.images[1] else ()
        for number in range(count):
            at_s += chance.expovariate(rate_rps)
            items = image * chance.randint(*self.images)
            text, output = chance.randint(*self.text), chance.randint(*self.output)
            prompt_tokens = text + sum(item.tokens for item in items)
            made.append(Request(f"{number}", at_s, prompt_tokens, output, items))
        return made

    def _image(self) -> Item:
        width, height = self.size
        return Item(self.tokens.tokens(width, height), width, height, tiles=tiles_of(self.tokens, width, height))

    def _again(self, rate_rps: float, count: int, begin: int) -> list[Request]:
        own = self.recorded
        usual_s = 1.0 / (self.rate_rps or 1.0)
        scale = 1.0 / (rate_rps * usual_s)
        at_s, made, before = 0.0, [], own[begin]
        for number in range(count):
            turn, place = divmod(begin + number, len(own))
            one = own[place]
            at_s += (one.at_s - before.at_s if place else usual_s) * scale if number else 0.0
            before = one
            items = tuple(changed(item, key=f"{item.key}/{turn}" if item.key else "") for item in one.items)
            session = f"{one.session}/{turn}" if one.session else ""
            made.append(changed(one, id=f"{number}", at_s=at_s, items=items, session=session))
        return made

    @cached_property
    def work(self) -> Work:
        """On average."""
        sample = self.recorded or self.at(1.0, 512, 0)
        return Work(
            fmean(len(one.items) for one in sample),
            fmean(one.item_tokens for one in sample),
            fmean(one.prompt_tokens for one in sample),
            fmean(one.output_tokens for one in sample),
        )


def workload_of(text: str, tokens: ImageTokens) -> Workload:
    """What `--workload` says. Raises ConfigError: it is of neither form, or the recording cannot be read."""
    if text.startswith(RECORDED):
        return Workload(text, tokens, read_traffic(Path(text.removeprefix(RECORDED)).expanduser()))
    found = Workload(text, tokens)
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name == "images" and (images := _IMAGES.fullmatch(value)):
            found = replace(found, images=_range(images[1]), size=(int(images[2]), int(images[3])))
        elif name == "text" and _RANGE.fullmatch(value) and _range(value)[0] > 0:
            found = replace(found, text=_range(value))
        elif name == "output" and _RANGE.fullmatch(value) and _range(value)[0] > 0:
            found = replace(found, output=_range(value))
        else:
            raise ConfigError(
                f"--workload {text}: {part!r} is none of images=N@WxH, text=N and output=N (each N a number or "
                f"LOW-HIGH; text and output from 1 on), and the whole is not {RECORDED}FILE",
                param="--workload",
            )
    return found


def _range(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    first, last = sorted((int(low), int(high or low)))
    return first, last
