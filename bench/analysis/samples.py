"""The sample of which a figure is a statistic: requests of a load, rows of any other measurement. Pure.

A request adds to a throughput the tokens that it got within the window. A sample counts only where its statistic is the
figure as it was recorded: it is never guessed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.analysis.intervals import Sample
from bench.clients.metrics import Window
from bench.clients.records import Outcome, RequestRecord
from bench.clients.slo import parse_slos
from bench.statistic import percentile

PAIRED = 0.9
"""Share of the requests of both runs that have to be in both for them to be drawn together."""
ROUNDING_S = 0.0005
"""Windows are recorded in whole milliseconds."""
TOLERANCE, EXACT = 2e-3, 2e-6
"""By which a figure may differ from its record: of requests, for that rounding, and of rows."""
LEAST_ROWS = 3
_SPREAD = re.compile(r"(ttft|tpot|itl|e2e)_ms/(?:mean|p(\d+))")
_SLO = re.compile(r"slo_([\d.e+]+:[\d.e+]+)/(attainment|effective_tokens_per_s(?:_per_device)?)")
_STATISTIC = re.compile(r"(?:^|_)(median|mean|p(?:25|50|75|90|95|99))(?:_|$)")


@dataclass(frozen=True, eq=False)
class Samples:
    """Of one figure in two results, or why there is none. `over`: what is sampled."""

    base: Sample | None = None
    other: Sample | None = None
    over: str = ""
    why: str = ""
    paired: bool = False


class LoadedRuns:
    """The requests of two runs, in one order where both sent the same ones.

    Args:
        windows_s: the lengths of their windows, which ended when the last request was due.
        devices: that served them.
    """

    def __init__(
        self,
        base: Sequence[RequestRecord],
        other: Sequence[RequestRecord],
        windows_s: tuple[float, float],
        devices: tuple[int, int] = (1, 1),
    ) -> None:
        sides = [{(row.spec, row.n): row for row in rows} for rows in (base, other)]
        both = sorted({*sides[0], *sides[1]}, key=lambda key: (key[1], key[0]))
        self.paired = len(sides[0].keys() & sides[1].keys()) >= PAIRED * len(both)
        orders = [both, both] if self.paired else [list(side) for side in sides]
        self._rows = [[side.get(key) for key in keys] for side, keys in zip(sides, orders, strict=True)]
        self._windows_s, self._devices = windows_s, devices

    def samples(self, figure: str, recorded: tuple[float, float]) -> Samples:
        """Of a figure with these values (base, other)."""
        found = []
        for rows, window_s, devices, value in zip(self._rows, self._windows_s, self._devices, recorded, strict=True):
            sample = _sample(figure, rows, window_s, devices)
            if sample is None:
                return Samples(why="not of single requests")
            if not math.isclose(sample.statistic, value, rel_tol=TOLERANCE, abs_tol=1e-4):
                return Samples(why="the requests that were kept do not give it")
            if not sample.enough:
                return Samples(why="too few requests")
            found.append(sample)
        over = f"{'paired ' if self.paired else ''}requests"
        return Samples(found[0], found[1], over, paired=self.paired)


def _sample(figure: str, rows: Sequence[RequestRecord | None], window_s: float, devices: int) -> Sample | None:
    """Of a figure of one run by its name; None where its requests give none of that name."""
    there = [(place, row) for place, row in enumerate(rows) if row is not None]
    end_s = max(row.due_s for _, row in there)
    window = Window(end_s - window_s - ROUNDING_S, end_s)
    due = [(place, row) for place, row in there if window.begin_s <= row.due_s]
    values: list[tuple[int, float]]  # place of the request, number
    if found := _SPREAD.fullmatch(figure):
        kind, percent = found[1], int(found[2]) if found[2] else None
        times = [(at, row.itl_s if kind == "itl" else [getattr(row, f"{kind}_s")]) for at, row in due if row.ok]
        values = [(place, one * 1e3) for place, seconds in times for one in seconds if one is not None]
        return _of(values, len(rows), percent)
    objective = _SLO.fullmatch(figure)
    (slo,) = parse_slos(objective[1]) if objective else (None,)
    if objective and slo and objective[2] == "attainment":
        about = [(place, row) for place, row in due if row.outcome is not Outcome.CANCELLED]
        return _of([(place, float(slo.attained(row))) for place, row in about], len(rows))
    per_s = len(there) / window_s if window_s > 0 else math.nan  # of the mean of all requests of the run
    if objective or figure == "output_tokens_per_s":
        values = [(at, window.tokens([row]) if slo is None or slo.attained(row) else 0.0) for at, row in there]
        return _of(values, len(rows), scale=per_s / (devices if figure.endswith("per_device") else 1))
    if figure == "answered_rps":
        values = [(at, float(row.ok and window.begin_s <= row.ended_s <= end_s)) for at, row in there]
        return _of(values, len(rows), scale=per_s)
    return None


def _of(values: Sequence[tuple[int, float]], members: int, percent: int | None = None, scale: float = 1.0) -> Sample:
    owners, numbers = zip(*values, strict=True) if values else ((), ())
    return Sample(np.asarray(numbers, np.float64), np.asarray(owners, np.int64), members, percent, scale)


def row_samples(
    figure: str,
    base: Sequence[Mapping[str, Any]],
    other: Sequence[Mapping[str, Any]],
    recorded: tuple[float, float],
) -> Samples:
    """The column of the rows of both of which a figure is the median, the mean or a percentile.

    Rows are those that the figure's name speaks of: of `unique/TP1/median_ms`, those with `unique` and `TP1` in them.
    """
    sides = [_columns(_rows_of(figure, rows)) for rows in (base, other)]
    word = _STATISTIC.search(figure.rsplit("/", 1)[-1])
    for column in sorted(
        sides[0].keys() & sides[1].keys(), key=lambda one: (one.rsplit("/", 1)[-1] not in figure, one)
    ):
        for name in [word[1]] if word else ["median", "mean"]:
            columns = [side[column] for side in sides]
            if all(_is(name, values, value) for values, value in zip(columns, recorded, strict=True)):
                percent = None if name == "mean" else 50 if name == "median" else int(name[1:])
                left, right = (Sample.of(values, percent) for values in columns)
                if left.enough and right.enough:
                    return Samples(left, right, "rows")
                return Samples(why=f"{min(left.members, right.members)} rows are too few")
    return Samples(why="no column of the rows gives it")


def _is(name: str, values: Sequence[float], value: float) -> bool:
    if len(values) < LEAST_ROWS:
        return False
    if name in ("mean", "median"):
        found = float(np.mean(values) if name == "mean" else np.median(values))
    else:
        found = percentile(values, int(name[1:]))
    return math.isclose(found, value, rel_tol=EXACT, abs_tol=1e-9)


def _rows_of(figure: str, rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Rows whose words are those of the figure's name, where a column has a word that the name has."""
    for key in [key for key in (rows[0] if rows else {}) if all(isinstance(row.get(key), str) for row in rows)]:
        named = [
            word for row in rows if (word := row[key]) and re.search(rf"(^|[/_ ]){re.escape(word)}([/_ ]|$)", figure)
        ]
        if named:
            rows = [row for row in rows if row[key] == max(named, key=len)]
    return rows


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
