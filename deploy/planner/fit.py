"""From points that were measured to lines and tables: medians, least squares of relative errors, none below 0. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np

from epd_serve.sim.profile import Line

_Key = TypeVar("_Key")

OUTLIER = 3.0
"""A step that takes so many times the median of those like it was held up by something else."""


def medians(rows: Iterable[tuple[_Key, float]]) -> dict[_Key, float]:
    """The median of the values of each key, in the order in which keys occur first."""
    found: dict[_Key, list[float]] = {}
    for key, value in rows:
        found.setdefault(key, []).append(value)
    return {key: statistics.median(values) for key, values in found.items()}


def least_squares(rows: Iterable[tuple[Sequence[float], float]], *, relative: bool = True) -> tuple[float, ...]:
    """The coefficients, none below 0, with which (amounts, seconds) have the least squares of relative errors, or, of
    waits, which may be 0, of absolute ones.

    Medians of equal amounts are fitted: a stall of the machine counts for nothing, short times as much as long ones.
    Of the few amounts that there are, every choice of those that count is tried; () from no rows.
    """
    points = medians((tuple(amounts), y) for amounts, y in rows)
    points = {amounts: y for amounts, y in points.items() if y > 0 or not relative}
    if not points:
        return ()
    wanted = np.array([1.0 if relative else y for y in points.values()])
    matrix = np.array([[one / y if relative else one for one in amounts] for amounts, y in points.items()])
    best, least = np.zeros(matrix.shape[1]), np.inf
    for size in range(1, matrix.shape[1] + 1):
        for chosen in itertools.combinations(range(matrix.shape[1]), size):
            found = np.zeros(matrix.shape[1])
            found[list(chosen)] = np.linalg.lstsq(matrix[:, chosen], wanted, rcond=None)[0]
            error = float(np.square(matrix @ found - wanted).sum())
            if (found >= 0).all() and error < least * (1 - 1e-9):
                best, least = found, error
    return tuple(float(one) for one in best)


def line(rows: Iterable[tuple[float, float]], *, relative: bool = True) -> Line:
    """The line through (amount, seconds), as of `least_squares`; no time at all from no rows."""
    setup, slope = least_squares((((1.0, x), y) for x, y in rows), relative=relative) or (0.0, 0.0)
    return Line(setup, slope)


def table(rows: Sequence[tuple[int, float, float]], least: int = 8) -> tuple[tuple[tuple[float, float], ...], float]:
    """Seconds of decode steps: (batch, KV tokens, seconds) → points by batch, means of those that nothing held up, and
    what each token of KV adds.

    What KV adds is the slope within batches, all together; more in a batch never takes less time (neighbours that would
    fall are put at their mean). Batches of which fewer than `least` steps were seen are left out.
    """
    whole = medians((batch, y) for batch, _, y in rows)
    by_batch = {
        batch: [(kv, y) for one, kv, y in rows if one == batch and y <= OUTLIER * whole[batch]] for batch in whole
    }
    by_batch = {batch: found for batch, found in by_batch.items() if len(found) >= least}
    spread = both = 0.0
    for batch, found in by_batch.items():
        mean_kv, mean_y = (statistics.fmean(column) for column in zip(*found, strict=True))
        weight = whole[batch] ** -2
        spread += weight * sum((kv - mean_kv) ** 2 for kv, _ in found)
        both += weight * sum((kv - mean_kv) * (y - mean_y) for kv, y in found)
    slope = max(0.0, both / spread) if spread else 0.0
    points = {batch: statistics.fmean(max(0.0, y - slope * kv) for kv, y in by_batch[batch]) for batch in by_batch}
    return rising(points), slope


def rising(points: dict[int, float]) -> tuple[tuple[float, float], ...]:
    """In the order of their amounts, where none is below the one before (pool adjacent violators)."""
    pools: list[tuple[list[int], float]] = []  # amounts, and the mean of their values
    for x in sorted(points):
        pools.append(([x], points[x]))
        while len(pools) > 1 and pools[-2][1] > pools[-1][1]:
            (more, y1), (xs, y0) = pools.pop(), pools.pop()
            pools.append((xs + more, (y0 * len(xs) + y1 * len(more)) / (len(xs) + len(more))))
    return tuple((float(x), y) for xs, y in pools for x in xs)


def residual(rows: Iterable[tuple[float, float]]) -> float:
    """Median relative error of (predicted, measured); 0 of none."""
    errors = [abs(predicted - measured) / measured for predicted, measured in rows if measured > 0]
    return statistics.median(errors) if errors else 0.0


def spread(rows: Iterable[tuple[float, float]], count: int = 20) -> tuple[float, ...]:
    """Of (predicted, measured): measured over predicted at `count` shares of the rows, ascending; () of fewer rows."""
    ratios = [measured / predicted for predicted, measured in rows if predicted > 0]
    if len(ratios) < count:
        return ()
    return tuple(round(float(one), 4) for one in np.quantile(ratios, (np.arange(count) + 0.5) / count))
