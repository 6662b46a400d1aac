"""The check against Table 5: `rank_correlation_table5`, what else the paper prints, and what it all hangs on.

Everything is emulated in virtual time with the constants of one device file: no win may be claimed from it.

    rank_correlation_table5               Spearman's correlation of the six layouts' effective throughput per device,
                                          emulated against printed, each at 10 requests a second in all
    rank_correlation_table5_implied_load  the same with each layout at the load that its printed row implies
    rank_correlation_table5_monoliths     the same with the two layouts of monoliths at 10 requests a second and device
    rank_correlation_table5_seeds_min, _max   least and most of the first one over single seeds
    rank_correlation_table5_min, _max     least and most of the first one over every constant 30 % less and more
    agreement/READING/METRIC/…            Spearman, Kendall, and the share of all orders that would do as well by chance
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from bench.analysis.page import require
from bench.clients.sender import Run
from bench.clients.slo import Slo
from bench.papers.devices import openpangu_vl_7b_910b
from bench.papers.devices.stage import CONSTANTS, StageDevice
from bench.papers.emulation.table5 import (
    METRICS,
    SLO,
    Load,
    Table,
    agreement,
    emulated_table,
    plain,
    readings,
    run_of,
    swapped,
    tpot_ms,
    ttft_ms,
)
from bench.papers.printed import OUTPUT_TOKENS, TABLE_5
from bench.record import add_arguments, environment, flatten, write
from deploy.placement_table import table as text_table

SEEDS, QUICK_SEEDS = (0, 1, 2, 3), (0,)
SINGLE_SEEDS = range(10)
READINGS: Mapping[str, tuple[str, str]] = {
    "total": ("", "10 req/s for each layout, as the caption says"),
    "implied": ("_implied_load", "the requests a second that each printed row implies"),
    "monoliths": (
        "_monoliths",
        "10 req/s for each layout, but 10 per device for the two of which a device is a whole one",
    ),
}
"""Suffix of the figure, and what it is, by reading of Table 5's loads."""
DEVICES: Mapping[str, tuple[StageDevice, Mapping[str, StageDevice]]] = {
    "910b": (openpangu_vl_7b_910b.DEVICE, openpangu_vl_7b_910b.READINGS)
}
"""Device and other readings of its sources, by the name that `--emulate` takes."""
STRICT = Slo(800, 30)  # §4.4
SHARE = 0.3
AVERAGE_IMAGE = (802, 652)
"""EPD-Serve §4.1; how sizes spread around it is our choice."""

Rows = list[dict[str, Any]]


def kind_of(device: StageDevice) -> str:
    """Returns what a result says that its figures are."""
    return f"emulated {device.name} (bench/papers/devices/, virtual clock)"


def check(device: StageDevice, others: Mapping[str, StageDevice], *, quick: bool) -> tuple[dict[str, float], Rows]:
    """Print what is emulated beside what is printed.

    Args:
        others: the device as its sources can also be read. quick: one seed, and without the sensitivity.

    Returns:
        Figures and rows of a result.
    """
    load = Load()
    figures: dict[str, float] = {}
    rows: Rows = []
    parts = [_readings(device, load, QUICK_SEEDS if quick else SEEDS), _other_numbers(device, load)]
    if not quick:
        parts += [_single_seeds(device, load), sensitivity(device, others, load)]
    for part in parts:
        for text, more, raw in part:
            print(f"{text}\n", flush=True)
            figures |= {name: round(value, 4) for name, value in more.items()}
            rows += raw
    return figures, rows


Part = Iterator[tuple[str, Mapping[str, float], Rows]]
"""Text, figures and rows, piece by piece."""


def _readings(device: StageDevice, load: Load, seeds: Sequence[int]) -> Part:
    implied = {f"printed/{name}/implied_rps": row.implied_rps for name, row in TABLE_5.items()}
    yield f"Table 5 as printed implies these loads:\n{implied_table()}", implied, []
    for reading, rates in readings().items():
        emulated = emulated_table(device, load, rates, seeds)
        agreements = {metric: agreement(emulated, metric) for metric in METRICS}
        flips = {metric: swapped(TABLE_5, emulated, metric) for metric in METRICS}
        figures = {
            f"rank_correlation_table5{READINGS[reading][0]}": agreements["per_device"]["spearman"],
            **flatten(agreements, f"agreement/{reading}/"),
            **flatten(plain(emulated), f"emulated/{reading}/"),
        }
        row = {"part": "reading", "reading": reading, "rates": rates, "table": plain(emulated), "flips": flips}
        yield reading_table(reading, emulated, rates, agreements, flips), figures, [row]


def implied_table() -> str:
    """Returns how many requests a second Table 5's rows imply."""
    rows: list[tuple[str, ...]] = [("layout", "devices", "attainment", "tokens/s/device", "⇒ req/s", "⇒ per device")]
    for name, row in TABLE_5.items():
        loads = (f"{row.implied_rps:.2f}", f"{row.implied_rps / row.devices:.2f}")
        rows.append((name, str(row.devices), f"{row.attainment:.2%}", f"{row.per_device:.2f}", *loads))
    return text_table(rows)


def reading_table(
    reading: str,
    emulated: Table,
    rates: Mapping[str, float],
    agreements: Mapping[str, Mapping[str, float]],
    flips: Mapping[str, Sequence[tuple[str, str]]],
) -> str:
    """Returns emulated beside printed values, the correlations, and the pairs of layouts in another order."""

    def cell(name: str, metric: str) -> str:
        values = (float(getattr(table[name], metric)) for table in (emulated, TABLE_5))
        return "{} ({})".format(*(f"{value:.3f}" if value < 1 else f"{value:.1f}" for value in values))

    rows: list[tuple[str, ...]] = [("layout", "req/s", *(f"{metric} (printed)" for metric in METRICS.values()))]
    rows += [(name, f"{rates[name]:.1f}", *(cell(name, metric) for metric in METRICS)) for name in emulated]
    rows += [
        (name, "", *(f"{agreements[metric][name]:+.3f}" for metric in METRICS))
        for name in ("spearman", "kendall", "by_chance")
    ]
    lines = [f"{reading}: {READINGS[reading][1]}", text_table(rows)]
    for metric, pairs in flips.items():
        if pairs:
            others = ", ".join(f"{one} above {other}" for one, other in pairs)
            lines.append(f"against the print, {METRICS[metric]}: {others}")
    return "\n".join(lines)


class PrintedNumber(NamedTuple):
    """A number of the paper, from `low` to `high`. `used`: a constant was solved from it: agreement is no finding."""

    name: str
    source: str
    low: float
    high: float
    emulated: float
    used: bool = False


def _other_numbers(device: StageDevice, load: Load) -> Part:
    numbers = other_numbers(device, load, QUICK_SEEDS)
    rows: list[tuple[str, ...]] = [("", "printed", "emulated", "", "where")]
    for one in numbers:
        printed = f"{one.low:g}" if one.low == one.high else f"{one.low:g} to {one.high:g}"
        rows.append((one.name, printed, f"{one.emulated:.1f}", "used" if one.used else "", one.source))
    figures = {f"other_numbers/{one.name}": one.emulated for one in numbers if one.emulated < float("inf")}
    raw = [{"part": "other numbers", **one._asdict(), "emulated": str(one.emulated)} for one in numbers]
    yield f"what else the paper prints; a constant was solved from what is marked:\n{text_table(rows)}", figures, raw


def other_numbers(device: StageDevice, load: Load, seeds: Sequence[int]) -> list[PrintedNumber]:
    """Returns what EPD-Serve prints of these deployments beside Table 5; each emulated number the mean of `seeds`."""

    def mean(figure: Callable[[Run], float], layout: str, rate_rps: float) -> float:
        return statistics.fmean(figure(run_of(layout, device, load, rate_rps, seed)) for seed in seeds)

    def change(figure: Callable[[Run], float], layout: str, to: str) -> float:
        """Per cent between two layouts, each at 12 requests a second and device."""
        of, base = (mean(figure, one, 24 if one.endswith(("-D", "-P")) else 12) for one in (layout, to))
        return 100 * (of / base - 1) if base else float("inf")

    tpots = [change(tpot_ms, layout, "TP1") for layout in ("EP-D", "(E-P)-D", "(E-D)-P")]
    table_2, at = "Table 2, EPD-Serve", "12 req/s per NPU"
    return [
        PrintedNumber(
            "E-P-D, 2 req/s per NPU: TTFT, ms", table_2, 481.38, 481.38, mean(ttft_ms, "E-P-D", 6), used=True
        ),
        PrintedNumber("E-P-D, 3 req/s per NPU: TTFT, ms", table_2, 650.51, 650.51, mean(ttft_ms, "E-P-D", 9)),
        PrintedNumber(
            "E-P-D, 2 req/s per NPU: TPOT, ms", "Table 2, all rows", 38.20, 39.42, mean(tpot_ms, "E-P-D", 6), True
        ),
        PrintedNumber(
            "E-P-D, 3 req/s per NPU: TPOT, ms", "Table 2, all rows", 41.50, 43.95, mean(tpot_ms, "E-P-D", 9), True
        ),
        PrintedNumber(
            f"(E-PD) over TP1, {at}: throughput, %", "§4.3", 12.87, 14.88, change(_tokens_per_s, "(E-PD)", "TP1"), True
        ),
        PrintedNumber(f"(E-PD) over TP1, {at}: TTFT, %", "§4.3", -3.25, -2.7, change(ttft_ms, "(E-PD)", "TP1")),
        PrintedNumber(f"(E-PD) over TP1, {at}: TPOT, %", "§4.3", -70.39, -69.58, change(tpot_ms, "(E-PD)", "TP1")),
        PrintedNumber(f"D apart over TP1, {at}: TPOT, %, least", "§4.4", -79.99, -79.99, max(tpots)),
        PrintedNumber(f"D apart over TP1, {at}: TPOT, %, most", "§4.4", -93.31, -93.31, min(tpots)),
        PrintedNumber(f"(E-D)-P over EP-D, {at}: TTFT, %", "§4.4", -54.56, -39.22, change(ttft_ms, "(E-D)-P", "EP-D")),
        PrintedNumber(
            f"(E-P)-D over EP-D, {at}: effective throughput, %",
            "§4.4",
            57.37,
            69.48,
            change(_effective, "(E-P)-D", "EP-D"),
        ),
        PrintedNumber("EP-D, 4 req/s per NPU: attainment of 800:30, %", "§4.4", 59.57, 59.57, mean(_strict, "EP-D", 8)),
        PrintedNumber(
            "(E-P)-D, 4 req/s per NPU: attainment of 800:30, %", "§4.4", 84.96, 84.96, mean(_strict, "(E-P)-D", 8)
        ),
    ]


def _tokens_per_s(run: Run) -> float:
    return len(run.rows) * OUTPUT_TOKENS / run.ended_s


def _effective(run: Run) -> float:
    return sum(map(SLO.attained, run.rows)) * OUTPUT_TOKENS / run.ended_s


def _strict(run: Run) -> float:
    return 100 * statistics.fmean(map(STRICT.attained, run.rows))


def _single_seeds(device: StageDevice, load: Load) -> Part:
    """The first reading by seed: what 512 requests leave to chance."""
    tables = {seed: emulated_table(device, load, readings()["total"], (seed,)) for seed in SINGLE_SEEDS}
    correlations = {seed: agreement(one, "per_device")["spearman"] for seed, one in tables.items()}
    rows = [
        {"part": "seed", "seed": seed, "rank_correlation": round(correlations[seed], 4), "table": plain(one)}
        for seed, one in tables.items()
    ]
    text = "by seed: " + ", ".join(f"{one:+.3f}" for one in correlations.values())
    yield text, _least_and_most("_seeds", correlations.values()), rows


@dataclass(frozen=True)
class Variation:
    """A device with something changed. `constant`: which one, "" where it is a reading of the sources."""

    name: str
    device: StageDevice
    load: Load
    constant: str = ""


def variations(device: StageDevice, others: Mapping[str, StageDevice], load: Load) -> Iterator[Variation]:
    """Every constant 30 % less and more, and what the sources can mean otherwise."""
    for constant in CONSTANTS:
        for factor, sign in ((1 - SHARE, "-"), (1 + SHARE, "+")):
            yield Variation(f"{constant} {sign}{SHARE:.0%}", device.scaled(constant, factor), load, constant)
    for name, one in others.items():
        yield Variation(name, one, load)
    yield Variation("every picture 802x652", device, Load(load.count, AVERAGE_IMAGE))


def sensitivity(device: StageDevice, others: Mapping[str, StageDevice], load: Load) -> Part:
    """Of the first reading, with the first seed."""
    rates = readings()["total"]
    before = emulated_table(device, load, rates, QUICK_SEEDS)
    outcomes: dict[Variation, tuple[float, list[tuple[str, str]]]] = {}
    rows: Rows = []
    for one in variations(device, others, load):
        after = emulated_table(one.device, one.load, rates, QUICK_SEEDS)
        correlation, turned = agreement(after, "per_device")["spearman"], swapped(before, after)
        outcomes[one] = correlation, turned
        result = {"rank_correlation": round(correlation, 4), "turned": turned, "table": plain(after)}
        rows.append({"part": "sensitivity", "variation": one.name, **result})
    figures = {
        **{f"sensitivity/{one.name}": correlation for one, (correlation, _) in outcomes.items()},
        **_least_and_most("", [correlation for one, (correlation, _) in outcomes.items() if one.constant]),
        **_least_and_most("_readings", [correlation for one, (correlation, _) in outcomes.items() if not one.constant]),
    }
    lines: list[tuple[str, ...]] = [
        ("variation", "rank correlation", "pairs that turn (effective throughput per device)")
    ]
    lines += [
        (one.name, f"{correlation:+.3f}", ", ".join(f"{low} > {high}" for low, high in turned))
        for one, (correlation, turned) in outcomes.items()
        if turned
    ]
    unvaried = agreement(before, "per_device")["spearman"]
    head = f"±30 % of each constant, and other readings (seed {QUICK_SEEDS[0]}, where it is {unvaried:+.3f}):"
    still = sum(not turned for _, turned in outcomes.values())
    yield f"{head}\n{text_table(lines)}\n{still} of {len(outcomes)} variations turn no pair", figures, rows


def _least_and_most(suffix: str, values: Any) -> dict[str, float]:
    values = list(values)
    return {f"rank_correlation_table5{suffix}_{end.__name__}": end(values) for end in (min, max)}


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m bench.papers.emulation`: the check alone."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python -m bench.papers.emulation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--emulate", default="910b", choices=tuple(DEVICES), help="device (default 910b)")
    add_arguments(parser, quick="one seed, no sensitivity")
    arguments = parser.parse_args(argv)
    require(["scipy"])
    device, others = DEVICES[arguments.emulate]
    env = environment(argv, kind_of(device))
    env |= {"command": shlex.join([*parser.prog.split(), *argv]), "constants": asdict(device)}
    figures, rows = check(device, others, quick=arguments.quick)
    write(arguments.json, figures, env, rows)
    return 0
