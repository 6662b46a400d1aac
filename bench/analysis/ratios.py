"""The ratio of a figure of two results: its interval, where requests were kept, and what that says. Pure.

A request adds to a throughput the tokens that it got within the window. A sample counts only where its statistic is the
figure as it was recorded: it is never guessed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from bench.analysis.intervals import Sample, ratio_interval
from bench.analysis.metrics import better
from bench.analysis.results import PER_DEVICE, LoadedRun
from bench.clients.metrics import Window
from bench.clients.records import Outcome, RequestRecord
from bench.clients.slo import parse_slos

NEGLIGIBLE = 0.02
"""Difference of a ratio from 1: with the same requests on both sides an interval may exclude 1 by nothing at all."""
PAIRED = 0.9
"""Share of the requests of both runs that have to be in both for them to be drawn together."""
ROUNDING_S = 0.0005
"""Windows are recorded in whole milliseconds."""
TOLERANCE = 2e-3
"""By which a figure may differ from its record, for that rounding."""
_SPREAD = re.compile(r"(ttft|tpot|itl|e2e)_ms/(?:mean|p(\d+))")
_SLO = re.compile(r"slo_([\d.e+]+:[\d.e+]+)/(attainment|effective_tokens_per_s)")
Verdict = Literal["better", "worse", "no difference shown", "no interval", ""]
Rows = Sequence[RequestRecord | None]


@dataclass(frozen=True)
class Ratio:
    """B over A of one figure.

    Attributes:
        ratio: None where A is 0, or one is below it.
        low, high: of its interval (95 %); None where there is none, and `why` says why.
        over: what was drawn: `paired requests` or `requests`. samples: how many of them.
    """

    figure: str
    a: float
    b: float
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    over: str = ""
    samples: int = 0
    why: str = ""

    @property
    def verdict(self) -> Verdict:
        """Of B. Without a direction of the figure there is none but that no difference shows."""
        direction = better(self.figure)
        if self.ratio is None or self.low is None or self.high is None:
            return "no interval" if direction else ""
        if self.low <= 1 <= self.high or abs(self.ratio - 1) < NEGLIGIBLE:
            return "no difference shown"
        if not direction:
            return ""
        return "better" if (self.low > 1) == (direction == "higher") else "worse"


def plain_ratio(figure: str, a: float, b: float, why: str) -> Ratio:
    """Without an interval."""
    return Ratio(figure, a, b, b / a, why=why) if a > 0 and b >= 0 else Ratio(figure, a, b, why="one is 0 or below")


def run_ratio(figure: str, a: LoadedRun, b: LoadedRun) -> Ratio | None:
    """Of two runs, with an interval where their requests give the figure; None where one has no such figure."""
    values = a.figure(figure), b.figure(figure)
    if values[0] is None or values[1] is None:
        return None
    plain = plain_ratio(figure, values[0], values[1], "")
    if plain.ratio is None:
        return plain
    paired, sides = _in_one_order(a.requests, b.requests)
    samples = []
    for run, rows, value in zip((a, b), sides, values, strict=True):
        sample = _sample(figure, run, rows) if run.requests else None
        why = "" if sample else "not of single requests" if run.requests else "its requests were not kept"
        if sample and not math.isclose(sample.statistic, value or 0.0, rel_tol=TOLERANCE, abs_tol=1e-4):
            why = "the requests that were kept do not give it"
        elif sample and not sample.enough:
            why = "too few requests"
        if why or sample is None:
            return plain_ratio(figure, plain.a, plain.b, why)
        samples.append(sample)
    if (ends := ratio_interval(samples[1], samples[0], paired=paired)) is None:
        return plain_ratio(figure, plain.a, plain.b, "too many resamples are 0")
    over, counted = "paired requests" if paired else "requests", min(one.counted for one in samples)
    return Ratio(figure, plain.a, plain.b, plain.ratio, *ends, over=over, samples=counted)


def _in_one_order(a: Sequence[RequestRecord], b: Sequence[RequestRecord]) -> tuple[bool, tuple[Rows, Rows]]:
    """(whether nearly all are in both, the requests of each): in one order then, None for one that only one has."""
    sides = [{(row.spec, row.n): row for row in rows} for rows in (a, b)]
    both = sorted({*sides[0], *sides[1]}, key=lambda key: (key[1], key[0]))
    if len(sides[0].keys() & sides[1].keys()) < PAIRED * len(both):
        return False, (a, b)
    return True, ([sides[0].get(key) for key in both], [sides[1].get(key) for key in both])


def _sample(figure: str, run: LoadedRun, rows: Rows) -> Sample | None:
    """Of a figure of one run by its name; None where its requests give none of that name."""
    there = [(place, row) for place, row in enumerate(rows) if row is not None]
    window_s, end_s = run.figures["window_s"], max(row.due_s for _, row in there)
    window = Window(end_s - window_s - ROUNDING_S, end_s)
    due = [(place, row) for place, row in there if window.begin_s <= row.due_s]
    if found := _SPREAD.fullmatch(figure):
        kind, percent = found[1], int(found[2]) if found[2] else None
        times = [(at, row.itl_s if kind == "itl" else [getattr(row, f"{kind}_s")]) for at, row in due if row.ok]
        return _of([(place, one * 1e3) for place, all_s in times for one in all_s if one is not None], rows, percent)
    name = figure.removesuffix(PER_DEVICE)
    objective = _SLO.fullmatch(name)
    slo = parse_slos(objective[1])[0] if objective else None
    if objective and slo and objective[2] == "attainment":
        about = [(place, row) for place, row in due if row.outcome is not Outcome.CANCELLED]
        return _of([(place, float(slo.attained(row))) for place, row in about], rows)
    if objective or name == "output_tokens_per_s":
        values = [(at, window.tokens([row]) if slo is None or slo.attained(row) else 0.0) for at, row in there]
    elif name == "answered_rps":
        values = [(at, float(row.ok and window.begin_s <= row.ended_s <= end_s)) for at, row in there]
    else:
        return None
    per_s = len(there) / window_s if window_s > 0 else math.nan  # of the mean of all requests of the run
    return _of(values, rows, scale=per_s / (run.devices if figure.endswith(PER_DEVICE) else 1))


def _of(values: Sequence[tuple[int, float]], rows: Rows, percent: int | None = None, scale: float = 1.0) -> Sample:
    """`values`: (place of the request, number)."""
    owners, numbers = zip(*values, strict=True) if values else ((), ())
    return Sample(np.asarray(numbers, np.float64), np.asarray(owners, np.int64), len(rows), percent, scale)
