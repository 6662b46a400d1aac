"""How well emulated deployments keep the order of EPD-Serve's Table 5. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from bench.devices.serving import Serving
from bench.emulation.loads import Loads
from bench.emulation.ranks import by_chance, flipped, kendall, spearman
from bench.emulation.serve import emulate
from bench.emulation.table5 import METRICS, PRINTED, Row5, mean_row, row5
from epd_serve.layout_parser import parse

Table = Mapping[str, Row5]
"""Rows by layout, as Table 5 names and orders them."""


@dataclass(frozen=True)
class Agreement:
    """Of an emulated table with the printed one. By metric (`METRICS`)."""

    spearman: Mapping[str, float]
    kendall: Mapping[str, float]
    by_chance: Mapping[str, float]
    flipped: Mapping[str, Sequence[tuple[str, str]]]


def emulated_table(device: Serving, loads: Loads, rates: Mapping[str, float], seeds: Sequence[int]) -> Table:
    """Each layout of `rates` at its requests a second; the mean of `seeds`."""
    return {name: mean_row([_row(device, loads, name, rate, seed) for seed in seeds]) for name, rate in rates.items()}


def _row(device: Serving, loads: Loads, name: str, rate_rps: float, seed: int) -> Row5:
    layout = parse(name)
    run = emulate(layout, device, loads.at(rate_rps, seed), f"{rate_rps:g} rps").run
    return row5(run, layout.device_count)


def agreement(table: Table, printed: Table = PRINTED) -> Agreement:
    """Of the layouts that `table` has."""
    found: dict[str, dict[str, float]] = {"spearman": {}, "kendall": {}, "by_chance": {}}
    turned: dict[str, Sequence[tuple[str, str]]] = {}
    for metric in METRICS:
        theirs = {name: float(getattr(printed[name], metric)) for name in table}
        ours = {name: float(getattr(row, metric)) for name, row in table.items()}
        pair = list(ours.values()), list(theirs.values())
        found["spearman"][metric], found["kendall"][metric] = spearman(*pair), kendall(*pair)
        found["by_chance"][metric] = by_chance(*pair)
        turned[metric] = flipped(theirs, ours)
    return Agreement(found["spearman"], found["kendall"], found["by_chance"], turned)


def plain(table: Table) -> dict[str, dict[str, float]]:
    """For a result file."""
    return {name: {metric: round(value, 5) for metric, value in asdict(row).items()} for name, row in table.items()}
