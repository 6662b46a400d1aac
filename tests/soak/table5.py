"""`python -m tests.soak.table5`: EPD-Serve's Table 5 by emulation, how well its order agrees with the print, and why.

Everything is emulated in virtual time with the constants of one device file: no win may be claimed from it.

    rank_correlation_table5               Spearman's correlation of the six layouts' effective throughput per device,
                                          emulated against printed, each at 10 requests a second in all
    rank_correlation_table5_implied_load  the same with each layout at the load that its printed row implies
    rank_correlation_table5_monoliths     the same with the two layouts of monoliths at 10 requests a second and device
    rank_correlation_table5_min, _max     least and most of the first one over every constant 30 % less and more;
                                          _readings_… over other readings of the sources, _seeds_… over single seeds
    agreement/READING/METRIC/…            Spearman and Kendall
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from bench.clients.sender import Run
from bench.clients.slo import attains
from bench.micro.measurement import Goal
from bench.record import flatten
from bench.workloads.generate import Knobs
from bench.workloads.requests import Poisson, RequestSpec, with_arrivals
from bench.workloads.workload import Workload
from deploy.memory.placement_table import table as text_table
from epd_serve.layout_parser import parse
from epd_serve.slo import Slo
from tests.soak.emulation.deployment import emulate
from tests.soak.emulation.device import CONSTANTS, StageDevice
from tests.soak.emulation.openpangu_vl_7b_910b import DEVICE
from tests.soak.emulation.openpangu_vl_7b_910b import READINGS as DEVICE_READINGS
from tests.soak.emulation.printed import OUTPUT_TOKENS, REQUESTS, TABLE_5, TABLE_5_RPS, Table5Row
from tests.soak.harness import Result, Soak

WORKLOAD = "sharegpt4o-like"
SLO = Slo(2000, 50, "mean")  # §4.5
STRICT = Slo(800, 30, "mean")  # §4.4
METRICS: Mapping[str, str] = {
    "per_device": "effective tokens/s per device",
    "attainment": "SLO attainment",
    "ttft_ms": "mean TTFT, ms",
    "tpot_ms": "mean TPOT, ms",
}
"""Columns of the table by attribute of `Table5Row`."""
SEEDS, QUICK_SEEDS, SINGLE_SEEDS = (0, 1, 2, 3), (0,), range(10)
SHARE = 0.3
AVERAGE_IMAGE = (802, 652)
"""EPD-Serve §4.1; how sizes spread around it is our choice."""

Table = Mapping[str, Table5Row]
"""Rows by layout, as Table 5 names and orders them."""
Rows = list[dict[str, Any]]
Part = tuple[str, Mapping[str, float], Rows]
"""Text, figures and rows."""


class Reading(NamedTuple):
    """A way to read under which load Table 5's rows were measured: `rates` by layout. `suffix`: of its figure."""

    suffix: str
    about: str
    rates: Mapping[str, float]


READINGS = {
    "total": Reading("", "10 req/s for each layout, as the caption says", dict.fromkeys(TABLE_5, TABLE_5_RPS)),
    "implied": Reading(
        "_implied_load",
        "the requests a second that each printed row implies",
        {name: row.implied_rps for name, row in TABLE_5.items()},
    ),
    "monoliths": Reading(  # what the implied ones look like before queues held them up
        "_monoliths",
        "10 req/s for each layout, but 10 per device for the two of which a device is a whole one",
        {name: TABLE_5_RPS * (row.devices if name.endswith("x2") else 1) for name, row in TABLE_5.items()},
    ),
}


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


def measure(arguments: argparse.Namespace) -> Result:
    figures: dict[str, float] = {}
    rows: Rows = []
    texts = []
    for text, more, raw in _parts(DEVICE, DEVICE_READINGS, quick=arguments.quick):
        texts.append(text)
        figures |= {name: round(value, 4) for name, value in more.items()}
        rows += raw
    return figures, rows, "\n\n".join(texts)


def _parts(device: StageDevice, others: Mapping[str, StageDevice], *, quick: bool) -> Iterator[Part]:
    load, seeds = Load(), QUICK_SEEDS if quick else SEEDS
    for name, reading in READINGS.items():
        yield against_print(name, emulated_table(device, load, reading.rates, seeds))
    yield _other_numbers(device, load)
    if not quick:
        yield sensitivity(device, others, load)


# --- the table ----------------------------------------------------------------------------------------------------


def run_of(layout: str, device: StageDevice, load: Load, rate_rps: float, seed: int) -> Run:
    return emulate(parse(layout), device, load.at(rate_rps, seed), f"{rate_rps:g} rps")


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
    attained = [row for row in run.rows if attains(row, SLO)]
    per_device = sum(row.output_tokens for row in attained) / (run.ended_s - run.begun_s) / devices
    return Table5Row(devices, ttft_ms(run), tpot_ms(run), len(attained) / len(run.rows), per_device)


def emulated_table(device: StageDevice, load: Load, rates: Mapping[str, float], seeds: Sequence[int]) -> Table:
    """Returns each layout of `rates` at its requests a second; the mean of `seeds`."""
    found = {}
    for name, rate_rps in rates.items():
        devices = parse(name).device_count
        rows = [table5_row(run_of(name, device, load, rate_rps, seed), devices) for seed in seeds]
        found[name] = Table5Row(devices, *map(statistics.fmean, list(zip(*rows, strict=True))[1:]))
    return found


def plain(table: Table) -> dict[str, dict[str, float]]:
    """Returns the table for a result file."""
    return {name: {metric: round(value, 5) for metric, value in row._asdict().items()} for name, row in table.items()}


def agreement(table: Table, metric: str) -> dict[str, float]:
    """Returns how alike the orders of emulated and printed values are, of the layouts that `table` has.

    Returns:
        spearman, kendall: rank correlation, tau-b, from -1 to 1; 0 where all values of one side are equal.
    """
    ours, theirs = ([float(getattr(rows[name], metric)) for name in table] for rows in (table, TABLE_5))
    if len(set(ours)) < 2 or len(set(theirs)) < 2:
        return {"spearman": 0.0, "kendall": 0.0}
    from scipy import stats  # of the extra `bench`

    correlations = {"spearman": stats.spearmanr, "kendall": stats.kendalltau}
    return {name: float(of(ours, theirs).statistic) for name, of in correlations.items()}


def swapped(before: Table, after: Table, metric: str = "per_device") -> list[tuple[str, str]]:
    """Returns pairs of layouts that stand in the other order, in the order of `before`. A tie is no order."""

    def step(table: Table, one: str, other: str) -> float:
        return float(getattr(table[one], metric) - getattr(table[other], metric))

    names = sorted(after, key=lambda name: float(getattr(before[name], metric)))
    pairs = itertools.combinations(names, 2)
    return [(one, other) for one, other in pairs if step(before, one, other) * step(after, one, other) < 0]


def against_print(reading: str, emulated: Table) -> Part:
    """Emulated beside printed values, the correlations, and the pairs of layouts that stand in another order."""

    def cell(name: str, metric: str) -> str:
        values = (float(getattr(table[name], metric)) for table in (emulated, TABLE_5))
        return "{} ({})".format(*(f"{value:.3f}" if value < 1 else f"{value:.1f}" for value in values))

    suffix, about, rates = READINGS[reading]
    agreements = {metric: agreement(emulated, metric) for metric in METRICS}
    flips = {metric: swapped(TABLE_5, emulated, metric) for metric in METRICS}
    rows: list[tuple[str, ...]] = [("layout", "req/s", *(f"{metric} (printed)" for metric in METRICS.values()))]
    rows += [(name, f"{rates[name]:.2f}", *(cell(name, metric) for metric in METRICS)) for name in emulated]
    rows += [(name, "", *(f"{each[name]:+.3f}" for each in agreements.values())) for name in ("spearman", "kendall")]
    lines = [f"{reading}: {about}", text_table(rows)]
    lines += [
        f"against the print, {METRICS[metric]}: " + ", ".join(f"{one} above {other}" for one, other in pairs)
        for metric, pairs in flips.items()
        if pairs
    ]
    figures = {
        f"rank_correlation_table5{suffix}": agreements["per_device"]["spearman"],
        **flatten(agreements, f"agreement/{reading}/"),
        **flatten(plain(emulated), f"emulated/{reading}/"),
    }
    row = {"part": "reading", "reading": reading, "rates": rates, "table": plain(emulated), "flips": flips}
    return "\n".join(lines), figures, [row]


# --- what else the paper prints -----------------------------------------------------------------------------------


class PrintedNumber(NamedTuple):
    """A number of the paper, from `low` to `high`. `used`: a constant was solved from it: agreement is no finding."""

    name: str
    source: str
    low: float
    high: float
    emulated: float
    used: bool = False


def other_numbers(device: StageDevice, load: Load) -> list[PrintedNumber]:
    """Returns what EPD-Serve prints of these deployments beside Table 5, each beside what a run emulates."""

    def of(layout: str, rate_rps: float, figure: Callable[[Run], float]) -> float:
        return figure(run_of(layout, device, load, rate_rps, 0))

    def change(figure: Callable[[Run], float], layout: str, base: str) -> float:
        """Per cent between two layouts, each at 12 requests a second and device."""
        values = [of(one, 24 if one.endswith(("-D", "-P")) else 12, figure) for one in (layout, base)]
        return 100 * (values[0] / values[1] - 1) if values[1] else float("inf")

    def tokens_per_s(run: Run) -> float:
        return len(run.rows) * OUTPUT_TOKENS / run.ended_s

    def effective(run: Run) -> float:
        return sum(attains(row, SLO) for row in run.rows) * OUTPUT_TOKENS / run.ended_s

    def strict(run: Run) -> float:
        return 100 * statistics.fmean(attains(row, STRICT) for row in run.rows)

    tpots = [change(tpot_ms, layout, "TP1") for layout in ("EP-D", "(E-P)-D", "(E-D)-P")]
    epd, at, attained = "E-P-D, {} req/s per NPU: {}, ms".format, "12 req/s per NPU", "attainment of 800:30, %"
    ratios = [
        PrintedNumber(f"{one} over {base}, {at}: {name}, %", where, low, high, change(figure, one, base), used)
        for one, base, name, figure, where, low, high, used in (
            ("(E-PD)", "TP1", "throughput", tokens_per_s, "§4.3", 12.87, 14.88, True),
            ("(E-PD)", "TP1", "TTFT", ttft_ms, "§4.3", -3.25, -2.7, False),
            ("(E-PD)", "TP1", "TPOT", tpot_ms, "§4.3", -70.39, -69.58, False),
            ("(E-D)-P", "EP-D", "TTFT", ttft_ms, "§4.4", -54.56, -39.22, False),
            ("(E-P)-D", "EP-D", "effective throughput", effective, "§4.4", 57.37, 69.48, False),
        )
    ]
    return [
        PrintedNumber(epd(2, "TTFT"), "Table 2, EPD-Serve", 481.38, 481.38, of("E-P-D", 6, ttft_ms), used=True),
        PrintedNumber(epd(3, "TTFT"), "Table 2, EPD-Serve", 650.51, 650.51, of("E-P-D", 9, ttft_ms)),
        PrintedNumber(epd(2, "TPOT"), "Table 2, all rows", 38.20, 39.42, of("E-P-D", 6, tpot_ms), used=True),
        PrintedNumber(epd(3, "TPOT"), "Table 2, all rows", 41.50, 43.95, of("E-P-D", 9, tpot_ms), used=True),
        *ratios,
        PrintedNumber(f"D apart over TP1, {at}: TPOT, %, least", "§4.4", -79.99, -79.99, max(tpots)),
        PrintedNumber(f"D apart over TP1, {at}: TPOT, %, most", "§4.4", -93.31, -93.31, min(tpots)),
        PrintedNumber(f"EP-D, 4 req/s per NPU: {attained}", "§4.4", 59.57, 59.57, of("EP-D", 8, strict)),
        PrintedNumber(f"(E-P)-D, 4 req/s per NPU: {attained}", "§4.4", 84.96, 84.96, of("(E-P)-D", 8, strict)),
    ]


def _other_numbers(device: StageDevice, load: Load) -> Part:
    numbers = other_numbers(device, load)
    rows: list[tuple[str, ...]] = [("", "printed", "emulated", "", "where")]
    for one in numbers:
        printed = f"{one.low:g}" if one.low == one.high else f"{one.low:g} to {one.high:g}"
        rows.append((one.name, printed, f"{one.emulated:.1f}", "used" if one.used else "", one.source))
    figures = {f"other_numbers/{one.name}": one.emulated for one in numbers if one.emulated < float("inf")}
    raw = [{"part": "other numbers", **one._asdict(), "emulated": str(one.emulated)} for one in numbers]
    return f"what else the paper prints; a constant was solved from what is marked:\n{text_table(rows)}", figures, raw


# --- what it hangs on ---------------------------------------------------------------------------------------------


class Variation(NamedTuple):
    """A device, a load or a seed other than those of the first reading. `of`: what its least and most is called by."""

    name: str
    of: str
    device: StageDevice
    load: Load
    seed: int = QUICK_SEEDS[0]


def variations(device: StageDevice, others: Mapping[str, StageDevice], load: Load) -> Iterator[Variation]:
    """Every constant 30 % less and more, what the sources can mean otherwise, and what requests leave to chance."""
    for constant in CONSTANTS:
        for sign, factor in (("-", 1 - SHARE), ("+", 1 + SHARE)):
            yield Variation(f"{constant} {sign}{SHARE:.0%}", "", device.scaled(constant, factor), load)
    for name, one in others.items():
        yield Variation(name, "_readings", one, load)
    yield Variation("every picture 802x652", "_readings", device, Load(load.count, AVERAGE_IMAGE))
    for seed in SINGLE_SEEDS:
        yield Variation(f"seed {seed}", "_seeds", device, load, seed)


def sensitivity(device: StageDevice, others: Mapping[str, StageDevice], load: Load) -> Part:
    """Of the first reading: how far its correlation goes, and which pairs of layouts turn."""
    rates = READINGS["total"].rates
    before = emulated_table(device, load, rates, QUICK_SEEDS)
    lines: list[tuple[str, ...]] = [("variation", "rank correlation", "pairs that turn (throughput per device)")]
    by_kind: dict[str, list[float]] = {}
    figures: dict[str, float] = {}
    rows: Rows = []
    for one in variations(device, others, load):
        after = emulated_table(one.device, one.load, rates, (one.seed,))
        correlation, turned = agreement(after, "per_device")["spearman"], swapped(before, after)
        by_kind.setdefault(one.of, []).append(correlation)
        figures[f"sensitivity/{one.name}"] = correlation
        result = {"rank_correlation": round(correlation, 4), "turned": turned, "table": plain(after)}
        rows.append({"part": "sensitivity", "variation": one.name, **result})
        if turned:
            lines.append((one.name, f"{correlation:+.3f}", ", ".join(f"{low} > {high}" for low, high in turned)))
    for kind, values in by_kind.items():
        figures |= {f"rank_correlation_table5{kind}_{end.__name__}": end(values) for end in (min, max)}
    unvaried = agreement(before, "per_device")["spearman"]
    head = f"±30 % of each constant, other readings, other seeds (seed {QUICK_SEEDS[0]}: {unvaried:+.3f}):"
    still = len(rows) + 1 - len(lines)
    return f"{head}\n{text_table(lines)}\n{still} of {len(rows)} variations turn no pair", figures, rows


SOAK = Soak(
    "table5",
    "six layouts on an emulated Atlas 800I A2, held against EPD-Serve's Table 5",
    measure,
    (Goal("rank_correlation_table5", ">=", 0.886, "an order by chance has it in one case of 60"),),
    kind=f"emulated {DEVICE.name} (virtual clock)",
)

if __name__ == "__main__":
    raise SystemExit(SOAK.main())
