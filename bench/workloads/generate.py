"""Requests of a profile: endless, lazy, fixed by (profile, knobs). Pure but for the tokenizer that counts.

Reuse: each occurrence of an image repeats an earlier one with probability `reuse`. Which one is drawn from those seen
so far, by age with weights rank^-zipf (the first image is rank 1): a few images are popular, as logos and screenshots
are; zipf 0 takes each as likely. A request never has an image twice while there are others, so in the first requests of
a workload with many images in each, and there alone, fewer repeats than asked for are possible.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from bench.workloads.distributions import Traffic
from bench.workloads.profiles import Profile
from bench.workloads.seeded_rng import seeded_rng, spread_quantile
from bench.workloads.spec import ImageRef, RequestSpec
from bench.workloads.text import Words
from epd_serve.errors import ConfigError

REDRAWS = 16
"""Of a repeated image that the request has already; after that a new image is taken."""


@dataclass(frozen=True)
class Knobs:
    """What a user may turn on any profile.

    Attributes:
        reuse: share of image occurrences that repeat an earlier image, 0 to below 1.
        zipf: how unevenly repeats fall on images; 0 is evenly.
        images: in each request that has any; None leaves it to the profile.
        output_tokens: None leaves it to the profile.
    """

    seed: int = 0
    reuse: float = 0.0
    zipf: float = 1.0
    images: int | None = None
    output_tokens: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.reuse < 1:
            raise ConfigError(f"reuse is {self.reuse:g}: from 0 to below 1", param="--reuse")
        if not 0 <= self.zipf <= 10:
            raise ConfigError(f"zipf is {self.zipf:g}: from 0 (evenly) to 10", param="--zipf")
        for flag, value in (("--pictures-each", self.images), ("--output-tokens", self.output_tokens)):
            if value is not None and value < 1:
                raise ConfigError(f"{flag} is {value}: 1 or more", param=flag)


def requests(profile: Profile, knobs: Knobs, words: Words) -> Iterator[RequestSpec]:
    """Without arrival times, which `bench/workloads/arrivals.py` puts on."""
    drawn, names = _Images(profile, knobs), (profile.name, knobs.seed)
    for index, traffic in enumerate(_traffic(profile, knobs.seed)):
        text_only = spread_quantile(index, *names, "text only") < traffic.text_only
        count = 0 if text_only else traffic.images.at(spread_quantile(index, *names, "images"))
        lengths = profile.text_only_tokens if text_only and profile.text_only_tokens else profile.text_tokens
        tokens = lengths.at(spread_quantile(index, *names, "tokens"))
        yield RequestSpec(
            id=f"{profile.name}-{knobs.seed}-{index}",
            text=words.exactly(tokens, seeded_rng(*names, "text", index)),
            images=drawn.take((knobs.images or count) if count else 0),
            max_tokens=knobs.output_tokens or profile.max_tokens,
            text_tokens=tokens,
            pace=traffic.pace,
        )


def _traffic(profile: Profile, seed: int) -> Iterator[Traffic]:
    """What traffic is like around each request: the profile's kinds take turns."""
    for turn, traffic in enumerate(itertools.cycle(profile.traffic)):
        yield from itertools.repeat(traffic, traffic.length(turn, profile.name, seed))


class _Images:
    """Draws images, new ones and repeats."""

    def __init__(self, profile: Profile, knobs: Knobs) -> None:
        self._sizes, self._knobs, self._names = profile.sizes, knobs, (profile.name, knobs.seed)
        self._occurrences = itertools.count()
        self._seen: list[ImageRef] = []
        self._weights: list[float] = []  # running sums over ranks

    def take(self, count: int) -> tuple[ImageRef, ...]:
        taken: list[ImageRef] = []
        for _ in range(count):
            taken.append(self._one(taken))
        return tuple(taken)

    def _one(self, beside: list[ImageRef]) -> ImageRef:
        index = next(self._occurrences)
        rng = seeded_rng(*self._names, "image", index)
        if self._seen and spread_quantile(index, *self._names, "repeats") < self._knobs.reuse:
            for draw in rng.random(REDRAWS):
                again = self._seen[bisect.bisect_left(self._weights, draw * self._weights[-1])]
                if again not in beside:
                    return again
        width, height = self._sizes.at(index, *self._names, "sizes")
        self._seen.append(ImageRef(width, height, "jpeg", seed=int(rng.integers(1 << 48))))
        rank = len(self._seen)
        self._weights.append((self._weights[-1] if self._weights else 0.0) + rank**-self._knobs.zipf)
        return self._seen[-1]
