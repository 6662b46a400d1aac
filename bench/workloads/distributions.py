"""Random streams that names fix, and distributions of a workload's numbers: how many tokens, how large images. Pure.

A draw depends on what it is for, never on what was drawn before it. Request 400 of a workload is the same whether 401
or 4000 are made, and a knob that changes one thing leaves the rest: each draw has a stream of its own, NumPy's PCG64
seeded by the digest of its names. NumPy keeps the bits of PCG64 and of `Generator.random` from version to version, and
may change the samplers made of them: a test pins numbers of each. A distribution gives its value at a quantile in (0,
1); who asks takes the quantiles evenly spread.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np
from msgspec import Struct

BLOCK = 32
"""Of quantiles in a row that cover (0, 1) evenly."""


def seeded_rng(*names: str | int) -> np.random.Generator:
    """Returns the stream that `names` name."""
    digest = hashlib.sha256("\x1f".join(map(str, names)).encode()).digest()
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(int.from_bytes(digest))))


def spread_quantile(index: int, *names: str | int) -> float:
    """Returns the index-th of a series of quantiles in (0, 1) of which every `BLOCK` in a row cover the range evenly.

    One falls in each 1/32 of the range, in random order (stratified sampling). So a sample of some hundred requests has
    the mean that a profile states and not one some per cent beside it, as independent draws would give; the values are
    distributed as before, only a run of nothing but large ones is less likely.
    """
    block, place = divmod(index, BLOCK)
    return _quantiles(block, *names)[place]


@lru_cache(maxsize=64)
def _quantiles(block: int, *names: str | int) -> list[float]:
    """Those of a block: the part of the range that each falls in, and where within it."""
    rng = seeded_rng(*names, "strata", block)
    order, within = rng.permutation(BLOCK), 1 - rng.random(BLOCK) * (1 - 1e-12)  # neither end of the range
    quantiles: list[float] = ((order + within) / BLOCK).tolist()
    return quantiles


normal_at = NormalDist().inv_cdf


class OneOf(Struct, frozen=True, tag="one of", tag_field="kind"):
    """Each of `values` as likely."""

    values: tuple[int, ...]

    def at(self, quantile: float) -> int:
        return self.values[int(quantile * len(self.values))]


class LogNormal(Struct, frozen=True, tag="log-normal", tag_field="kind"):
    """A log-normal of mean `mean`, before it is rounded and cut to `least`..`most`.

    Attributes:
        sigma: deviation of the logarithm.
    """

    mean: float
    sigma: float
    least: int = 1
    most: int = 4096

    def at(self, quantile: float) -> int:
        return self.at_normal(normal_at(quantile))

    def at_normal(self, deviations: float) -> int:
        value = self.mean * math.exp(self.sigma * (deviations - self.sigma / 2))
        return min(max(round(value), self.least), self.most)


class PowerLaw(Struct, frozen=True, tag="power law", tag_field="kind"):
    """A density that falls as x^-alpha from `least` on, cut off at `most`. The smaller alpha, the heavier the tail."""

    alpha: float
    least: int
    most: int

    def at(self, quantile: float) -> int:
        return min(int(self.least * math.pow(1 - quantile, -1 / (self.alpha - 1))), self.most)


class Zipf(Struct, frozen=True, tag="zipf", tag_field="kind"):
    """1 to `most`, k with a weight of k^-alpha."""

    alpha: float
    most: int

    def at(self, quantile: float) -> int:
        sums = _zipf_sums(self.alpha, self.most)
        return int(np.searchsorted(sums, quantile * sums[-1])) + 1


@lru_cache(maxsize=64)
def _zipf_sums(alpha: float, most: int) -> Any:
    return np.cumsum(np.arange(1, most + 1) ** -alpha)


Numbers = OneOf | LogNormal | PowerLaw | Zipf


class Sizes(Struct, frozen=True, tag="log-normal", tag_field="kind"):
    """Width and height of an image, log-normal both.

    Attributes:
        alike: correlation of the logarithms of width and height: 1 is one aspect ratio for all.
    """

    width: LogNormal
    height: LogNormal
    alike: float = 0.85

    def at(self, index: int, *names: str | int) -> tuple[int, int]:
        """Of the index-th image of a series that `names` name."""
        across, other = (normal_at(spread_quantile(index, *names, side)) for side in ("width", "height"))
        down = self.alike * across + math.sqrt(1 - self.alike * self.alike) * other
        return self.width.at_normal(across), self.height.at_normal(down)


class OneSizeOf(Struct, frozen=True, tag="one of", tag_field="kind"):
    """Each of `sizes` as likely."""

    sizes: tuple[tuple[int, int], ...]

    def at(self, index: int, *names: str | int) -> tuple[int, int]:
        return self.sizes[int(spread_quantile(index, *names, "size") * len(self.sizes))]


class Traffic(Struct, frozen=True):
    """What requests are like for a while.

    Attributes:
        requests: mean length of such a while; each is between half and one and a half of it.
        text_only: share of the requests without images.
        images: per request that has any.
        pace: arrivals come this many times as fast as on average.
    """

    requests: int
    text_only: float
    images: Numbers
    pace: float = 1.0

    def length(self, turn: int, *names: str | int) -> int:
        """Requests of the turn-th while."""
        return self.requests // 2 + int(seeded_rng(*names, "while", turn).integers(self.requests + 1))
