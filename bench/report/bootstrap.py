"""Intervals of ratios of means, over requests of two runs. Pure; how samples are drawn is `bench/compare/bootstrap.py`'s.

Where both runs sent the same requests, the same ones are drawn of both: what differs between requests is then no
difference between deployments. An interval is about these runs; another day, or another machine, is not in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from bench.compare import bootstrap
from bench.compare.bootstrap import Values, Weights, draw, share

RESAMPLES = 400
CONFIDENCE = bootstrap.LEVEL
LEAST = bootstrap.LEAST
"""Requests of each side; of fewer there is no interval."""
_MINE, _THEIRS = 0, 1  # seeds: the same report of the same folder


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

    def means(self, weights: Weights) -> Values:
        """Of each resample of the requests."""
        parts = np.array([self.parts.get(number, (0.0, 0.0)) for number in sorted(self.names)])
        return share(weights, parts[:, 0], parts[:, 1])


def interval(
    one: Sample, other: Sample, ratio: float, resamples: int = RESAMPLES
) -> tuple[float, float] | tuple[None, None]:
    """Of the ratio of two means, whose estimate is `ratio`; (None, None) of too few requests, or of means of 0."""
    if min(one.counted, other.counted) < LEAST or not one.mean or not other.mean or not ratio:
        return None, None
    mine = draw(len(one.names), resamples, _MINE)
    theirs = mine if one.names == other.names else draw(len(other.names), resamples, _THEIRS)
    scale = ratio / (one.mean / other.mean)
    return bootstrap.interval(scale * one.means(mine), other.means(theirs), CONFIDENCE) or (None, None)
