"""Distributions of a workload's numbers: how many tokens, how many pictures, how large. Pure.

Each gives its value at a quantile in (0, 1); who asks takes the quantiles from `chance`, evenly spread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bench.workloads.chance import Chance, normal_at, spread_quantile


@dataclass(frozen=True)
class Exactly:
    """Always the same."""

    value: int

    def at(self, quantile: float) -> int:
        return self.value


@dataclass(frozen=True)
class OneOf:
    """Each of `values` as likely."""

    values: Sequence[int]

    def at(self, quantile: float) -> int:
        return self.values[int(quantile * len(self.values))]


@dataclass(frozen=True)
class LogNormal:
    """A log-normal of mean `mean`, before it is rounded and cut to `least`..`most`.

    Attributes:
        sigma: deviation of the logarithm.
    """

    mean: float
    sigma: float
    least: int = 1
    most: int = 4096

    @property
    def median(self) -> float:
        return self.mean * math.exp(-self.sigma * self.sigma / 2)

    def at(self, quantile: float) -> int:
        return self.at_normal(normal_at(quantile))

    def at_normal(self, deviations: float) -> int:
        return min(max(round(self.median * math.exp(self.sigma * deviations)), self.least), self.most)


@dataclass(frozen=True)
class PowerLaw:
    """A density that falls as x^-alpha from `least` on, cut off at `most`. The smaller alpha, the heavier the tail."""

    alpha: float
    least: int
    most: int

    def at(self, quantile: float) -> int:
        return min(int(self.least * math.pow(1 - quantile, -1 / (self.alpha - 1))), self.most)


@dataclass(frozen=True)
class Zipf:
    """1 to `most`, k with a weight of k^-alpha."""

    alpha: float
    most: int

    def at(self, quantile: float) -> int:
        weights = [math.pow(k, -self.alpha) for k in range(1, self.most + 1)]
        left = quantile * sum(weights)
        for k, weight in enumerate(weights, 1):
            left -= weight
            if left <= 0:
                return k
        return self.most


Numbers = Exactly | OneOf | LogNormal | PowerLaw | Zipf


@dataclass(frozen=True)
class Sizes:
    """Width and height of a picture.

    Attributes:
        alike: correlation of the logarithms of width and height (log-normal ones): 1 is one aspect ratio for all.
    """

    width: Numbers
    height: Numbers
    alike: float = 0.85

    def at(self, index: int, *names: str | int) -> tuple[int, int]:
        """Of the index-th picture of a series that `names` name."""
        first, second = spread_quantile(index, *names, "width"), spread_quantile(index, *names, "height")
        if not (isinstance(self.width, LogNormal) and isinstance(self.height, LogNormal)):
            return self.width.at(first), self.height.at(second)
        across = normal_at(first)
        down = self.alike * across + math.sqrt(1 - self.alike * self.alike) * normal_at(second)
        return self.width.at_normal(across), self.height.at_normal(down)


@dataclass(frozen=True)
class OneSizeOf:
    """Each of `sizes` as likely."""

    sizes: Sequence[tuple[int, int]]

    def at(self, index: int, *names: str | int) -> tuple[int, int]:
        return self.sizes[int(spread_quantile(index, *names, "size") * len(self.sizes))]


PictureSizes = Sizes | OneSizeOf


@dataclass(frozen=True)
class Traffic:
    """What requests are like for a while.

    Attributes:
        requests: mean length of such a while; each is between half and one and a half of it.
        text_only: share of the requests without pictures.
        pictures: per request that has any.
        pace: arrivals come this many times as fast as on average.
    """

    requests: int
    text_only: float
    pictures: Numbers
    pace: float = 1.0

    def length(self, turn: int, *names: str | int) -> int:
        """Requests of the turn-th while of a series that `names` name."""
        return max(1, round(self.requests * (0.5 + Chance(*names, "length", turn).uniform())))
