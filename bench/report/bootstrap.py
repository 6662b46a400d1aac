"""Intervals of ratios of means by bootstrap over the requests of two runs. Pure.

Requests of one run wait for each other, so neighbours are drawn together, in circular blocks of the square root of the
sample (Politis and Romano 1992, "A circular block-resampling procedure for stationary data"). Where both runs sent the
same requests, the same ones are drawn of both: what differs between requests is then no difference between deployments.
An interval is about these runs; another day, or another machine, is not in it.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

RESAMPLES = 400
CONFIDENCE = 0.95
LEAST = 10
"""Requests of each side; of fewer there is no interval."""


@dataclass(frozen=True)
class Sample:
    """What the requests of a run add to a mean.

    Attributes:
        parts: by number of the request, (value, weight); the mean is the sum of values over that of weights.
        names: by number, what was asked; samples of the same names are drawn together.
    """

    parts: Mapping[int, tuple[float, float]]
    names: Mapping[int, str]

    @property
    def mean(self) -> float | None:
        weight = sum(weight for _, weight in self.parts.values())
        return sum(value for value, _ in self.parts.values()) / weight if weight else None

    @property
    def counted(self) -> int:
        return sum(weight > 0 for _, weight in self.parts.values())


def interval(
    one: Sample, other: Sample, ratio: float, resamples: int = RESAMPLES
) -> tuple[float, float] | tuple[None, None]:
    """Of the ratio of two means, whose estimate is `ratio`; (None, None) of too few requests, or of means of 0."""
    if min(one.counted, other.counted) < LEAST or not one.mean or not other.mean or not ratio:
        return None, None
    chance = random.Random(f"{one.counted} {other.counted} {ratio:.6g}")  # the same report of the same folder
    together = one.names == other.names
    mine, theirs = (_Blocks([s.parts.get(n, (0.0, 0.0)) for n in sorted(s.names)]) for s in (one, other))
    scale = ratio / (one.mean / other.mean)
    drawn = []
    for _ in range(resamples):
        starts = mine.starts(chance)
        above, below = mine.mean(starts), theirs.mean(starts if together else theirs.starts(chance))
        if above is not None and below:
            drawn.append(scale * above / below)
    if len(drawn) < resamples * CONFIDENCE:
        return None, None
    drawn.sort()
    tail = (1 - CONFIDENCE) / 2
    return drawn[int(tail * len(drawn))], drawn[math.ceil((1 - tail) * len(drawn)) - 1]


class _Blocks:
    """Circular blocks of (value, weight), by prefix sums."""

    def __init__(self, parts: Sequence[tuple[float, float]]) -> None:
        self._count = len(parts)
        self._length = max(1, round(math.sqrt(self._count)))
        round_ = [*parts, *parts[: self._length]]
        self._values = [0.0, *itertools.accumulate(value for value, _ in round_)]
        self._weights = [0.0, *itertools.accumulate(weight for _, weight in round_)]

    def starts(self, chance: random.Random) -> list[int]:
        return [int(chance.random() * self._count) for _ in range(-(-self._count // self._length))]

    def mean(self, starts: Sequence[int]) -> float | None:
        length, values, weights = self._length, self._values, self._weights
        weight = sum(weights[start + length] - weights[start] for start in starts)
        return sum(values[start + length] - values[start] for start in starts) / weight if weight > 0 else None
