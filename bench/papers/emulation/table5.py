"""EPD-Serve's Table 5 by emulation: its rows, under which loads, how well their order agrees with the print. Pure."""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bench.clients.sender import Run
from bench.clients.slo import Slo
from bench.papers.devices.stage import StageDevice
from bench.papers.emulation.deployment import emulate
from bench.papers.printed import REQUESTS, TABLE_5, TABLE_5_RPS, Table5Row
from bench.workloads.arrivals import Poisson, with_arrivals
from bench.workloads.generate import Knobs
from bench.workloads.spec import RequestSpec
from bench.workloads.workload import Workload
from epd_serve.layout_parser import parse

WORKLOAD = "sharegpt4o-like"
SLO = Slo(2000, 50)  # §4.5
METRICS: Mapping[str, str] = {
    "per_device": "effective tokens/s per device",
    "attainment": "SLO attainment",
    "ttft_ms": "mean TTFT, ms",
    "tpot_ms": "mean TPOT, ms",
}
"""Columns of the table by attribute of `Table5Row`."""
Table = Mapping[str, Table5Row]
"""Rows by layout, as Table 5 names and orders them."""


@dataclass(frozen=True)
class Load:
    """Requests of a run: the same ones for every layout, equal for equal seeds.

    Attributes:
        count: of a run. size: (width, height) of every image, instead of the workload's own sizes.
    """

    count: int = REQUESTS
    size: tuple[int, int] | None = None

    def at(self, rate_rps: float, seed: int) -> Sequence[RequestSpec]:
        """Returns them with Poisson arrivals, so many a second in all."""
        return list(with_arrivals(_requests(self.count, self.size, seed), Poisson(rate_rps), seed))


@functools.cache
def _requests(count: int, size: tuple[int, int] | None, seed: int) -> Sequence[RequestSpec]:
    requests = list(Workload(WORKLOAD, count, Knobs(seed)).requests())
    if size is None:
        return requests
    width, height = size
    return [
        replace(one, images=tuple(replace(image, width=width, height=height) for image in one.images))
        for one in requests
    ]


def readings() -> Mapping[str, Mapping[str, float]]:
    """Requests a second by layout, for each way to read under which load the rows were measured.

    `total`: 10 for each layout, as the caption says. `implied`: what each row implies. `monoliths`: 10 for each, but 10
    per device where a device is a whole deployment: what the implied ones look like before queues held them up.
    """
    return {
        "total": dict.fromkeys(TABLE_5, TABLE_5_RPS),
        "implied": {name: row.implied_rps for name, row in TABLE_5.items()},
        "monoliths": {name: TABLE_5_RPS * (row.devices if name.endswith("x2") else 1) for name, row in TABLE_5.items()},
    }


def run_of(layout: str, device: StageDevice, load: Load, rate_rps: float, seed: int) -> Run:
    return emulate(parse(layout), device, load.at(rate_rps, seed), f"{rate_rps:g} rps").run


def ttft_ms(run: Run) -> float:
    """Returns the mean over all requests."""
    return statistics.fmean(row.ttft_s or 0.0 for row in run.rows) * 1e3


def tpot_ms(run: Run) -> float:
    """Returns the mean over all requests."""
    return statistics.fmean(row.tpot_s or 0.0 for row in run.rows) * 1e3


def table5_row(run: Run, devices: int) -> Table5Row:
    """Returns the row of a run in which every request was answered.

    Its time is from the run's begin to its last token: the printed attainments are multiples of 1/512, so nothing was
    left out as warm-up.
    """
    assert run.rows and all(row.ok for row in run.rows)
    attained = [row for row in run.rows if SLO.attained(row)]
    per_device = sum(row.output_tokens for row in attained) / (run.ended_s - run.begun_s) / devices
    return Table5Row(devices, ttft_ms(run), tpot_ms(run), len(attained) / len(run.rows), per_device)


def emulated_table(device: StageDevice, load: Load, rates: Mapping[str, float], seeds: Sequence[int]) -> Table:
    """Returns each layout of `rates` at its requests a second; the mean of `seeds`."""

    def mean(name: str, rate_rps: float) -> Table5Row:
        devices = parse(name).device_count
        rows = [table5_row(run_of(name, device, load, rate_rps, seed), devices) for seed in seeds]
        return Table5Row(devices, *map(statistics.fmean, list(zip(*rows, strict=True))[1:]))

    return {name: mean(name, rate_rps) for name, rate_rps in rates.items()}


def plain(table: Table) -> dict[str, dict[str, float]]:
    """Returns the table for a result file."""
    return {name: {metric: round(value, 5) for metric, value in row._asdict().items()} for name, row in table.items()}


def agreement(table: Table, metric: str) -> dict[str, float]:
    """Returns how alike the orders of emulated and printed values are, of the layouts that `table` has.

    Returns:
        spearman, kendall: rank correlation, tau-b, from -1 to 1; 0 where all values of one side are equal.
        by_chance: share of all orders of the emulated values whose Spearman's correlation is at least as high: six rows
        prove little.
    """
    ours, theirs = ([float(getattr(rows[name], metric)) for name in table] for rows in (table, TABLE_5))
    if len(set(ours)) < 2 or len(set(theirs)) < 2:
        return {"spearman": 0.0, "kendall": 0.0, "by_chance": 1.0}
    from scipy import stats  # of the extra `bench`: whoever emulates has been told (`check.py`)

    ranks = stats.rankdata(theirs)  # of equal ranks the correlation grows with the sum of their products
    orders = stats.permutation_test(
        (stats.rankdata(ours),),
        lambda order, axis: np.sum(order * ranks, axis=axis),
        permutation_type="pairings",
        alternative="greater",
        vectorized=True,
        n_resamples=np.inf,
    )
    return {
        "spearman": float(stats.spearmanr(ours, theirs).statistic),
        "kendall": float(stats.kendalltau(ours, theirs).statistic),
        "by_chance": float(orders.pvalue),
    }


def swapped(before: Table, after: Table, metric: str = "per_device") -> list[tuple[str, str]]:
    """Returns pairs of layouts that stand in the other order, in the order of `before`. A tie is no order."""

    def step(table: Table, one: str, other: str) -> float:
        return float(getattr(table[one], metric) - getattr(table[other], metric))

    names = sorted(after, key=lambda name: float(getattr(before[name], metric)))
    return [
        (one, other)
        for one, other in itertools.combinations(names, 2)
        if step(before, one, other) * step(after, one, other) < 0
    ]
