"""Bootstrap: samples drawn from a sample, as weights, and the interval of a ratio from what they give. Pure, seeded.

Samples are drawn in circular blocks of neighbours (Politis and Romano, 1992): requests that follow each other wait in
the same queue, and drawn one by one they would look like more evidence than they are. Blocks of n^(1/3), as usual.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Weights = NDArray[np.int64]
"""[resamples, n]: how often each member is in each resample; every row sums to n."""
Values = NDArray[np.float64]

LEVEL = 0.95
LEAST = 10
"""Members of a sample below which no interval is given."""
LEAST_BEYOND = 5
"""Values that have to lie beyond a percentile: of fewer its interval is the spread of single requests."""
LARGEST = 40_000_000
"""Cells of a matrix that are worked on at once."""


def draw(n: int, resamples: int, seed: int) -> Weights:
    """Weights of `resamples` samples of n members in circular blocks."""
    block = max(1, round(n ** (1 / 3)))
    chance = np.random.default_rng([seed, n])
    starts = chance.integers(0, n, (resamples, -(-n // block)))
    members = ((starts[:, :, None] + np.arange(block)) % n).reshape(resamples, -1)[:, :n]
    cells = members + np.arange(resamples)[:, None] * n
    return np.bincount(cells.ravel(), minlength=resamples * n).reshape(resamples, n)


def whole(n: int) -> Weights:
    """The sample itself, as one resample."""
    return np.ones((1, n), dtype=np.int64)


def share(weights: Weights, above: Values, below: Values) -> Values:
    """Sum of `above` over the sum of `below`, of each resample; NaN where that is nothing."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found: Values = (weights @ above) / (weights @ below)
    return found


def percentiles(weights: Weights, values: Values, owners: NDArray[np.int64], percents: tuple[int, ...]) -> list[Values]:
    """Nearest-rank percentiles of each resample, as `bench.statistic.percentile` has them; NaN of an empty one.

    Args:
        values: any number of each member. owners: whose each value is.
    """
    order = np.argsort(values, kind="stable")
    ordered, owners = values[order], owners[order]
    chunk = max(1, LARGEST // max(1, len(values)))
    found: list[list[Values]] = [[] for _ in percents]
    for begin in range(0, len(weights), chunk):
        counts = np.cumsum(weights[begin : begin + chunk][:, owners], axis=1)
        totals = counts[:, -1] if counts.shape[1] else np.zeros(len(counts), dtype=np.int64)
        for place, percent in enumerate(percents):
            at = (counts < np.ceil(totals * percent / 100)[:, None]).sum(axis=1)
            picked = ordered[np.minimum(at, len(ordered) - 1)] if len(ordered) else np.zeros(len(counts))
            found[place].append(np.where(totals > 0, picked, np.nan))
    return [np.concatenate(parts) for parts in found]


def interval(above: Values, below: Values, level: float = LEVEL) -> tuple[float, float] | None:
    """The percentile interval of the ratios; None where more than one in twenty resamples has none."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = above / below
    known = ratios[np.isfinite(ratios)]
    if len(known) < 0.95 * len(ratios):
        return None
    low, high = np.quantile(known, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
