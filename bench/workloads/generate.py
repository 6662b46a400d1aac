"""Requests of a profile: endless, lazy, fixed by (profile, knobs). Pure but for the tokenizer that counts.

Reuse: each occurrence of a picture repeats an earlier one with probability `reuse`. Which one is drawn from those seen
so far, by age with weights rank^-zipf (the first picture is rank 1): a few pictures are popular, as logos and
screenshots are; zipf 0 takes each as likely. A request never has a picture twice while there are others, so in the
first requests of a workload with many pictures in each, and there alone, fewer repeats than asked for are possible.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from bench.workloads.chance import Chance, spread_quantile
from bench.workloads.distributions import Traffic
from bench.workloads.profiles import Profile
from bench.workloads.spec import PictureRef, RequestSpec
from bench.workloads.text import Words
from epd_serve.errors import ConfigError

REDRAWS = 16
"""Of a repeated picture that the request has already; after that a new picture is taken."""


@dataclass(frozen=True)
class Knobs:
    """What a user may turn on any profile.

    Attributes:
        reuse: share of picture occurrences that repeat an earlier picture, 0 to below 1.
        zipf: how unevenly repeats fall on pictures; 0 is evenly.
        pictures: in each request that has any; None leaves it to the profile.
        output_tokens: None leaves it to the profile.
    """

    seed: int = 0
    reuse: float = 0.0
    zipf: float = 1.0
    pictures: int | None = None
    output_tokens: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.reuse < 1:
            raise ConfigError(f"reuse is {self.reuse:g}: from 0 to below 1", param="--reuse")
        if not 0 <= self.zipf <= 10:
            raise ConfigError(f"zipf is {self.zipf:g}: from 0 (evenly) to 10", param="--zipf")
        for flag, value in (("--pictures-each", self.pictures), ("--output-tokens", self.output_tokens)):
            if value is not None and value < 1:
                raise ConfigError(f"{flag} is {value}: 1 or more", param=flag)


def requests(profile: Profile, knobs: Knobs, words: Words) -> Iterator[RequestSpec]:
    """Without arrival times, which `bench/workloads/arrivals.py` puts on."""
    drawn, name, seed = _Pictures(profile, knobs), profile.name, knobs.seed
    for index, traffic in enumerate(_whiles(profile, seed)):
        text_only = spread_quantile(index, name, seed, "text only") < traffic.text_only
        count = 0 if text_only else traffic.pictures.at(spread_quantile(index, name, seed, "pictures"))
        if knobs.pictures is not None and count:
            count = knobs.pictures
        lengths = profile.text_only_tokens if text_only and profile.text_only_tokens else profile.text_tokens
        tokens = lengths.at(spread_quantile(index, name, seed, "tokens"))
        yield RequestSpec(
            id=f"{name}-{seed}-{index}",
            text=words.exactly(tokens, Chance(name, seed, "text", index)),
            pictures=drawn.take(count),
            max_tokens=knobs.output_tokens or profile.max_tokens,
            text_tokens=tokens,
            pace=traffic.pace,
        )


def _whiles(profile: Profile, seed: int) -> Iterator[Traffic]:
    """What each request's while is like."""
    for turn in itertools.count():
        traffic = profile.traffic[turn % len(profile.traffic)]
        for _ in range(traffic.length(turn, profile.name, seed)):
            yield traffic


class _Pictures:
    """Draws pictures, new ones and repeats."""

    def __init__(self, profile: Profile, knobs: Knobs) -> None:
        self._profile, self._knobs = profile, knobs
        self._occurrences = 0
        self._seen: list[PictureRef] = []
        self._weights: list[float] = []  # running sums over ranks

    def take(self, count: int) -> tuple[PictureRef, ...]:
        found: list[PictureRef] = []
        for _ in range(count):
            found.append(self._one(found))
        return tuple(found)

    def _one(self, beside: list[PictureRef]) -> PictureRef:
        index, names = self._occurrences, (self._profile.name, self._knobs.seed)
        self._occurrences += 1
        if self._seen and spread_quantile(index, *names, "repeats") < self._knobs.reuse:
            chance = Chance(*names, "which", index)
            for _ in range(REDRAWS):
                again = self._seen[bisect.bisect_left(self._weights, chance.uniform() * self._weights[-1])]
                if again not in beside:
                    return again
        width, height = self._profile.sizes.at(index, *names, "sizes")
        seed = int.from_bytes(hashlib.sha256(f"{names}:{index}".encode()).digest()[:6])
        new = PictureRef(width, height, "jpeg", seed=seed)
        self._seen.append(new)
        rank = len(self._seen)
        self._weights.append((self._weights[-1] if self._weights else 0.0) + rank**-self._knobs.zipf)
        return new
