"""The samples of a figure that is no load's: the column of its result's rows whose statistic it is. Pure.

Every measurement has rows of its own making, and names figures as it likes. A column counts as the sample of a figure
where the rows that the figure's name speaks of (`unique/TP1/median_ms`: those with `unique` and `TP1` in them) give
its value again by one statistic. That has to hold in both results; so a sample is never guessed.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bench.compare.bootstrap import LEAST, LEAST_BEYOND, Values, Weights, percentiles, share
from bench.statistic import percentile

Columns = Mapping[str, Sequence[float]]

EXACT = 2e-6
LEAST_ROWS = 3


def _at(percent: int) -> Callable[[Sequence[float]], float]:
    return lambda values: percentile(values, percent)


STATISTICS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "median": statistics.median,
    "mean": statistics.fmean,
    **{f"p{percent}": _at(percent) for percent in (25, 50, 75, 90, 95, 99)},
}


def samples_of(
    name: str, a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]], values: tuple[float, float]
) -> tuple[str, list[float], list[float]] | None:
    """(statistic, sample in A, sample in B) of a figure with these values; None where no column gives both."""
    left, right = _columns(_spoken_of(name, a)), _columns(_spoken_of(name, b))
    for column in sorted(left.keys() & right.keys(), key=lambda one: (not _alike(one, name), one)):
        for statistic, of in _statistics(name):
            if _is(of, left[column], values[0]) and _is(of, right[column], values[1]):
                return statistic, list(left[column]), list(right[column])
    return None


def least(statistic: str) -> int:
    """Rows below which an interval of it says nothing."""
    if statistic in ("median", "mean"):
        return LEAST
    percent = int(statistic[1:])
    return max(LEAST, -(-100 * LEAST_BEYOND // min(percent, 100 - percent)))


def resampled(statistic: str, sample: Sequence[float], weights: Weights) -> Values:
    """The statistic of each resample."""
    values = np.asarray(sample, dtype=np.float64)
    if statistic == "mean":
        return share(weights, values, np.ones(len(values)))
    percent = 50 if statistic == "median" else int(statistic[1:])
    return percentiles(weights, values, np.arange(len(values)), (percent,))[0]


def _statistics(name: str) -> Iterator[tuple[str, Callable[[Sequence[float]], float]]]:
    """Those that the name allows: the one that it says, else median and mean."""
    last = name.rsplit("/", 1)[-1]
    said = [one for one in STATISTICS if re.search(rf"(^|_){one}(_|$)", last)]
    for one in said or ("median", "mean"):
        yield one, STATISTICS[one]


def _is(of: Callable[[Sequence[float]], float], sample: Sequence[float], value: float) -> bool:
    return len(sample) >= LEAST_ROWS and math.isclose(of(sample), value, rel_tol=EXACT, abs_tol=1e-9)


def _spoken_of(name: str, rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows whose words are those of the name, where a column has a word that the name has."""
    words = [key for key in (rows[0] if rows else {}) if all(isinstance(row.get(key), str) for row in rows)]
    found = list(rows)
    for key in words:
        named = {row[key] for row in rows if _has(name, row[key])}
        if named:
            longest = max(named, key=len)
            found = [row for row in found if row[key] == longest]
    return found


def _has(name: str, word: str) -> bool:
    return bool(word) and re.search(rf"(^|[/_ ]){re.escape(word)}([/_ ]|$)", name) is not None


def _alike(column: str, name: str) -> bool:
    """A column that is called as the figure comes first."""
    return column.rsplit("/", 1)[-1] in name or column in name


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Numbers of the rows by column, those of nested mappings by joined names; columns that every row has."""
    flat = [dict(_numbers(row)) for row in rows]
    names = set.intersection(*(set(row) for row in flat)) if flat else set()
    return {name: [row[name] for row in flat] for name in names}


def _numbers(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield prefix + name, float(value)
