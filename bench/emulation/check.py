"""The check against Table 5: `rank_correlation_table5`, what else the paper prints, and what it all hangs on.

Everything is emulated in virtual time with the constants of one device file: no win may be claimed from it (design §6).

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
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from bench.devices import openpangu_vl_7b_910b
from bench.devices.serving import Serving
from bench.emulation.agreement import agreement, emulated_table, plain
from bench.emulation.loads import Loads
from bench.emulation.printed import said
from bench.emulation.report import implied_table, reading_table, said_table, sensitivity_table
from bench.emulation.sensitivity import Varied, sensitivity, variations
from bench.emulation.table5 import METRICS, PRINTED, REQUESTS, readings
from bench.record import add_arguments, environment, flatten, write

SEEDS, QUICK_SEEDS = (0, 1, 2, 3), (0,)
SINGLE_SEEDS = range(10)
NAMED = {"total": "", "implied": "_implied_load", "monoliths": "_monoliths"}
DEVICES: Mapping[str, tuple[Serving, Mapping[str, Serving]]] = {
    "910b": (openpangu_vl_7b_910b.DEVICE, openpangu_vl_7b_910b.READINGS)
}
"""Device and other readings of its sources, by the name that `--emulate` takes."""

Found = tuple[dict[str, float], list[dict[str, Any]]]


def kind_of(device: Serving) -> str:
    return f"emulated {device.name} (bench/devices/, virtual clock)"


def check(device: Serving, others: Mapping[str, Serving], *, quick: bool, say: Callable[[str], None] = print) -> Found:
    """(figures, rows). `quick`: one seed, and without the sensitivity."""
    seeds = QUICK_SEEDS if quick else SEEDS
    loads = Loads(REQUESTS)
    say(f"Table 5 as printed implies these loads:\n{implied_table()}\n")
    figures, rows = _readings(device, loads, seeds, say)
    numbers = said(device, loads, QUICK_SEEDS)
    say(f"what else the paper prints; a constant was solved from what is marked:\n{said_table(numbers)}\n")
    for one in numbers:
        if one.emulated < float("inf"):
            figures[f"other_numbers/{one.name}"] = one.emulated
        rows.append({"part": "other numbers", **asdict(one), "emulated": str(one.emulated)})
    if not quick:
        more, raw = _single_seeds(device, loads, say)
        figures |= more
        rows += raw
        more, raw = _sensitivity(device, others, loads, say)
        figures |= more
        rows += raw
    return figures, rows


def _readings(device: Serving, loads: Loads, seeds: Sequence[int], say: Callable[[str], None]) -> Found:
    figures: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    for reading, rates in readings().items():
        emulated = emulated_table(device, loads, rates, seeds)
        found = agreement(emulated)
        say(f"{reading_table(reading, emulated, dict(rates), found)}\n")
        figures[f"rank_correlation_table5{NAMED[reading]}"] = round(found.spearman["per_device"], 4)
        for metric in METRICS:
            values = {name: getattr(found, name)[metric] for name in ("spearman", "kendall", "by_chance")}
            figures |= flatten({name: round(one, 4) for name, one in values.items()}, f"agreement/{reading}/{metric}/")
        figures |= flatten(plain(emulated), f"emulated/{reading}/")
        flips = {metric: [list(pair) for pair in pairs] for metric, pairs in found.flipped.items()}
        rows.append({"part": "reading", "reading": reading, "rates": rates, "table": plain(emulated), "flips": flips})
    figures |= {f"printed/{name}/implied_rps": round(row.implied_rps, 3) for name, row in PRINTED.items()}
    return figures, rows


def _single_seeds(device: Serving, loads: Loads, say: Callable[[str], None]) -> Found:
    """The first reading by seed: what 512 requests leave to chance."""
    tables = {seed: emulated_table(device, loads, readings()["total"], (seed,)) for seed in SINGLE_SEEDS}
    found = {seed: agreement(one).spearman["per_device"] for seed, one in tables.items()}
    say("by seed: " + ", ".join(f"{one:+.3f}" for one in found.values()) + "\n")
    figures = {
        "rank_correlation_table5_seeds_min": round(min(found.values()), 4),
        "rank_correlation_table5_seeds_max": round(max(found.values()), 4),
    }
    rows: list[dict[str, Any]] = [
        {"part": "seed", "seed": seed, "rank_correlation": round(found[seed], 4), "table": plain(one)}
        for seed, one in tables.items()
    ]
    return figures, rows


def _sensitivity(device: Serving, others: Mapping[str, Serving], loads: Loads, say: Callable[[str], None]) -> Found:
    """Of the first reading, with the first seed."""
    rates = readings()["total"]
    sourced = emulated_table(device, loads, rates, QUICK_SEEDS)
    varied = list(sensitivity(sourced, variations(device, others), rates, QUICK_SEEDS, REQUESTS))
    before = agreement(sourced).spearman["per_device"]
    say(f"±30 % of each constant, and other readings (seed {QUICK_SEEDS[0]}, where it is {before:+.3f}):")
    say(sensitivity_table(varied))
    thirty = [one.correlation for one in varied if one.variation.constant]
    figures = {f"sensitivity/{one.variation.name}": round(one.correlation, 4) for one in varied}
    figures |= {
        "rank_correlation_table5_min": round(min(thirty), 4),
        "rank_correlation_table5_max": round(max(thirty), 4),
        "rank_correlation_table5_readings_min": round(min(one.correlation for one in _read(varied)), 4),
        "rank_correlation_table5_readings_max": round(max(one.correlation for one in _read(varied)), 4),
    }
    rows = [
        {
            "part": "sensitivity",
            "variation": one.variation.name,
            "rank_correlation": round(one.correlation, 4),
            "turned": [list(pair) for pair in one.turned],
            "table": plain(one.table),
        }
        for one in varied
    ]
    return figures, rows


def _read(varied: Sequence[Varied]) -> list[Varied]:
    return [one for one in varied if not one.variation.constant]


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m bench.emulation`: the check alone."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python -m bench.emulation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--emulate", default="910b", choices=tuple(DEVICES), help="device (default 910b)")
    add_arguments(parser, quick="one seed, no sensitivity")
    arguments = parser.parse_args(words)
    device, others = DEVICES[arguments.emulate]
    env = environment(words, kind_of(device))
    env |= {"command": shlex.join(["python", "-m", "bench.emulation", *words]), "constants": asdict(device)}
    figures, rows = check(device, others, quick=arguments.quick)
    write(arguments.json, figures, env, rows)
    return 0
