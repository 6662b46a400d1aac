"""Intervals of ratios of two samples, by SciPy's bootstrap over blocks of neighbours. Pure, seeded.

Requests that follow each other wait in the same queue; drawn one by one they would look like more evidence than they
are. So what is drawn are blocks of n^(1/3) neighbours (Carlstein, 1986). An interval speaks of the requests of these
two runs. What differs between two runs of the same thing (a machine's mood, a thermal limit) is not in it.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95
RESAMPLES = 2000
LEAST = 10
"""Members of a sample below which no interval is given."""
LEAST_BEYOND = 5
"""Members that have to lie beyond a percentile: of fewer its interval is the spread of single requests."""
BATCH = 100
"""Resamples that are worked on at once."""

Values = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Sample:
    """Values of the members of a sample, which are requests or rows, in their order.

    Attributes:
        values: any number of each member. owners: by value, the number of its member.
        members: how many there are.
        percent: the statistic is this percentile (nearest rank, as `bench.statistic.percentile`); None: the mean.
        scale: the figure is the statistic times this.
    """

    values: Values
    owners: NDArray[np.int64]
    members: int
    percent: int | None = None
    scale: float = 1.0

    @classmethod
    def of(cls, values: Any, percent: int | None = None) -> Sample:
        """One value of each member."""
        found = np.asarray(values, dtype=np.float64)
        return cls(found, np.arange(len(found)), len(found), percent)

    @property
    def statistic(self) -> float:
        """Of the sample itself, scaled; NaN of an empty one."""
        return self.scale * float(self.of_blocks(np.arange(self.blocks)))

    @cached_property
    def counted(self) -> int:
        """Members that have a value."""
        return len(set(self.owners.tolist()))

    @property
    def enough(self) -> bool:
        """They are enough for an interval to mean something."""
        beyond = LEAST_BEYOND if self.percent is None else self.counted * min(self.percent, 100 - self.percent) / 100
        return self.counted >= LEAST and beyond >= LEAST_BEYOND

    @property
    def blocks(self) -> int:
        """Blocks of n^(1/3) members."""
        return max(1, round(math.pow(self.members, 2 / 3)))

    def of_blocks(self, drawn: NDArray[np.int64]) -> Values:
        """The statistic of resamples. `drawn`: blocks by number, [..., number of blocks]."""
        values, block = self._sorted
        if not len(values):
            return np.full(drawn.shape[:-1], np.nan)
        times = (drawn[..., None] == np.arange(self.blocks)).sum(-2)[..., block]  # [..., values]
        with np.errstate(divide="ignore", invalid="ignore"):
            if self.percent is None:
                found: Values = (times @ values) / times.sum(-1)
                return found
        ranks = np.cumsum(times, axis=-1)
        at = (ranks < np.ceil(ranks[..., -1:] * self.percent / 100)).sum(-1)
        return np.where(ranks[..., -1] > 0, values[np.minimum(at, len(values) - 1)], np.nan)

    @cached_property
    def _sorted(self) -> tuple[Values, NDArray[np.int64]]:
        """Values in ascending order, and the block of each."""
        order = np.argsort(self.values, kind="stable")
        return self.values[order], self.owners[order] * self.blocks // max(1, self.members)


def ratio_interval(other: Sample, base: Sample, *, paired: bool, seed: int = 0) -> tuple[float, float] | None:
    """The percentile interval of `other` over `base`; None where more than one in twenty resamples has no ratio.

    Args:
        paired: members of a number are the same request in both, and are drawn together: what a hard request costs
            both does not widen the interval then.
    """
    from scipy.stats import DegenerateDataWarning, bootstrap  # takes a second, and who only measures needs none

    assert not paired or other.members == base.members, "pairs have two sides"
    scale = other.scale / base.scale

    def ratio(*drawn: NDArray[np.int64], axis: int) -> Values:
        ratios: Values = scale * other.of_blocks(drawn[0]) / base.of_blocks(drawn[-1])
        return ratios

    numbers = [np.arange(one.blocks) for one in ((other,) if paired else (other, base))]
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", DegenerateDataWarning)  # of resamples without a ratio
        found = bootstrap(
            numbers,
            ratio,
            n_resamples=RESAMPLES,
            batch=BATCH,
            vectorized=True,
            method="percentile",
            rng=np.random.default_rng(seed),
        )
    ratios = found.bootstrap_distribution[np.isfinite(found.bootstrap_distribution)]
    if len(ratios) < LEVEL * RESAMPLES:
        return None
    low, high = np.quantile(ratios, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
