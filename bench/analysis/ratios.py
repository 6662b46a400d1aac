"""The ratio of a figure of two results: its interval, where requests were kept, and what that says. Pure, seeded.

Intervals are SciPy's bootstrap over blocks of neighbours. Requests that follow each other wait in the same queue; drawn
one by one they would look like more evidence than they are. So what is drawn are blocks of n^(1/3) neighbours
(Carlstein, 1986). An interval speaks of the requests of these two runs. What differs between two runs of the same thing
(a machine's mood, a thermal limit) is not in it.

A request adds to a throughput the tokens that it got within the window. A sample counts only where its statistic is the
figure as it was recorded: it is never guessed.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bench.analysis.results import PER_DEVICE, LoadedRun
from bench.analysis.sweep_results import better
from bench.clients.metrics import Window
from bench.clients.results import Outcome, RequestRecord
from bench.clients.slo import attains
from epd_serve.slo import parse_slos

LEVEL = 0.95
RESAMPLES = 2000
LEAST = 10
"""Members of a sample below which no interval is given."""
LEAST_BEYOND = 5
"""Members that have to lie beyond a percentile: of fewer its interval is the spread of single requests."""
BATCH = 100
"""Resamples that are worked on at once."""

NEGLIGIBLE = 0.02
"""Difference of a ratio from 1: with the same requests on both sides an interval may exclude 1 by nothing at all."""
PAIRED = 0.9
"""Share of the requests of both runs that have to be in both for them to be drawn together."""
ROUNDING_S = 0.0005
"""Windows are recorded in whole milliseconds."""
TOLERANCE = 2e-3
"""By which a figure may differ from its record, for that rounding."""
_SPREAD = re.compile(r"(ttft|tpot|e2e)_ms/(?:mean|p(\d+))")
_SLO = re.compile(r"slo_([\d.e+]+:[\d.e+]+:\w+)/(attainment|effective_tokens_per_s)")
Verdict = Literal["better", "worse", "no difference shown", "no interval", ""]
Rows = Sequence[RequestRecord | None]
Values = NDArray[np.float64]


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


def sample_ratio(figure: str, a: Sample, b: Sample, *, paired: bool) -> Ratio:
    """Of two samples, with an interval where they are large enough. `paired`: see `ratio_interval`."""
    plain = plain_ratio(figure, a.statistic, b.statistic, "")
    if plain.ratio is None:
        return plain
    if not (a.enough and b.enough):
        return replace(plain, why="too few requests")
    if (ends := ratio_interval(b, a, paired=paired)) is None:
        return replace(plain, why="too many resamples are 0")
    over, samples = "paired requests" if paired else "requests", min(a.counted, b.counted)
    return replace(plain, low=ends[0], high=ends[1], over=over, samples=samples)


def run_ratio(figure: str, a: LoadedRun, b: LoadedRun) -> Ratio | None:
    """Of two runs, with an interval where their requests give the figure; None where one has no such figure."""
    values = a.figure(figure), b.figure(figure)
    if values[0] is None or values[1] is None:
        return None
    paired, sides = _in_one_order(a.requests, b.requests)
    samples = []
    for run, rows, value in zip((a, b), sides, values, strict=True):
        sample = _sample(figure, run, rows) if run.requests else None
        why = "not of single requests" if run.requests else "its requests were not kept"
        if sample and not math.isclose(sample.statistic, value or 0.0, rel_tol=TOLERANCE, abs_tol=1e-4):
            sample, why = None, "the requests that were kept do not give it"
        if sample is None:
            return plain_ratio(figure, values[0], values[1], why)
        samples.append(sample)
    return sample_ratio(figure, *samples, paired=paired)


def _in_one_order(a: Sequence[RequestRecord], b: Sequence[RequestRecord]) -> tuple[bool, tuple[Rows, Rows]]:
    """(whether nearly all are in both, the requests of each): in one order then, None for one that only one has."""
    sides = [{(row.spec, row.n): row for row in rows} for rows in (a, b)]
    both = sorted({*sides[0], *sides[1]}, key=lambda key: (key[1], key[0]))
    if len(sides[0].keys() & sides[1].keys()) < PAIRED * len(both):
        return False, (a, b)
    return True, ([sides[0].get(key) for key in both], [sides[1].get(key) for key in both])


def _sample(figure: str, run: LoadedRun, rows: Rows) -> Sample | None:
    """Of a figure of one run by its name; None where its requests give none of that name."""
    window_s, end_s = run.figures["window_s"], run.requests[-1].due_s
    window = Window(end_s - window_s - ROUNDING_S, end_s)
    name, percent, scale = figure.removesuffix(PER_DEVICE), None, 1.0
    spread, objective = _SPREAD.fullmatch(name), _SLO.fullmatch(name)
    slo = parse_slos(objective[1])[0] if objective else None

    def value(row: RequestRecord) -> float | None:
        """What a request adds to the mean of all, or to the percentile; None where it is not of them."""
        if name == "answered_rps":
            return float(row.ok and window.begin_s <= row.ended_s <= end_s)
        if spread:
            seconds: float | None = getattr(row, f"{spread[1]}_s") if row.ok and window.begin_s <= row.due_s else None
            return None if seconds is None else seconds * 1e3
        if slo and objective and objective[2] == "attainment":
            about = row.outcome is not Outcome.CANCELLED and window.begin_s <= row.due_s
            return float(attains(row, slo)) if about else None
        return window.tokens([row]) if slo is None or attains(row, slo) else 0.0

    if spread:
        percent = int(spread[2]) if spread[2] else None
    elif name.endswith("_per_s") or name == "answered_rps":
        scale = len(run.requests) / window_s if window_s > 0 else math.nan  # of the mean of all requests of the run
        scale /= run.devices if figure.endswith(PER_DEVICE) else 1
    elif not objective:
        return None
    values = [None if row is None else value(row) for row in rows]
    return Sample(np.array(values, dtype=np.float64), percent, scale)


@dataclass(frozen=True, eq=False)
class Sample:
    """Values of the members of a sample, which are requests, in their order.

    Attributes:
        values: of each member, NaN of one that has none.
        percent: the statistic is this percentile (nearest rank, as `bench.statistic.percentile`); None: the mean.
        scale: the figure is the statistic times this.
    """

    values: Values
    percent: int | None = None
    scale: float = 1.0

    @property
    def statistic(self) -> float:
        """Of the sample itself, scaled; NaN of an empty one."""
        return self.scale * float(self.of_blocks(np.arange(len(self.blocks)))) if self.counted else math.nan

    @property
    def counted(self) -> int:
        """Members that have a value."""
        return int(np.isfinite(self.values).sum())

    @property
    def enough(self) -> bool:
        """They are enough for an interval to mean something."""
        beyond = LEAST_BEYOND if self.percent is None else self.counted * min(self.percent, 100 - self.percent) / 100
        return self.counted >= LEAST and beyond >= LEAST_BEYOND

    @cached_property
    def blocks(self) -> Values:
        """[blocks, n^(1/3) neighbours], filled up with NaN."""
        neighbours = max(1, round(len(self.values) ** (1 / 3)))
        return np.append(self.values, np.full(-len(self.values) % neighbours, np.nan)).reshape(-1, neighbours)

    def of_blocks(self, drawn: NDArray[np.int64]) -> Values:
        """The statistic of resamples; NaN of one without any value. `drawn`: blocks by number, [..., blocks]."""
        values = np.sort(self.blocks[drawn].reshape(*drawn.shape[:-1], -1))  # NaN is last
        counted = np.isfinite(values).sum(-1)
        if self.percent is None:
            return np.asarray(np.nansum(values, -1) / counted)
        rank = np.maximum(np.ceil(counted * self.percent / 100).astype(np.int64), 1)
        return np.asarray(np.take_along_axis(values, rank[..., None] - 1, -1)[..., 0])


def ratio_interval(other: Sample, base: Sample, *, paired: bool, seed: int = 0) -> tuple[float, float] | None:
    """The percentile interval of `other` over `base`; None where more than one in twenty resamples has no ratio.

    Args:
        paired: members of a number are the same request in both, and are drawn together: what a hard request costs
            both does not widen the interval then.
    """
    from scipy.stats import DegenerateDataWarning, bootstrap  # takes a second, and who only measures needs none

    assert not paired or len(other.values) == len(base.values), "pairs have two sides"
    scale = other.scale / base.scale

    def ratio(*drawn: NDArray[np.int64], axis: int) -> Values:
        ratios: Values = scale * other.of_blocks(drawn[0]) / base.of_blocks(drawn[-1])
        return ratios

    numbers = [np.arange(len(one.blocks)) for one in ((other,) if paired else (other, base))]
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
