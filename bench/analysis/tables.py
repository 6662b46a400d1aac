"""The tables of a comparison: what is missing, each rate, goodput, ratios, phases. Pure.

Runs that are not valid are in the table of rates, and in no ratio. `result.json` has all the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from bench.analysis.sweep_results import (
    THROUGHPUT,
    THROUGHPUT_PER_DEVICE,
    TPOT,
    TPOT_P99,
    TTFT,
    TTFT_P99,
    Run,
    SweepResults,
    attainment,
    effective_per_device,
)
from bench.clients.phases import phase_rows
from bench.sweep.compared import compared
from bench.sweep.experiment import Deployment
from epd_serve.slo import Slo

GOOD_SHARE = 90.0
"""Percent of requests within the objective at which a rate counts as goodput (HydraInfer §5.2, DistServe)."""

Cell = str | int | float | bool | None
Line = Mapping[str, Cell]
"""By column; a column's name has its unit, as `mean TTFT (ms)`. None where there is no number."""


@dataclass(frozen=True)
class Table:
    """A table. `lines`: all with the same columns; those whose `valid` is False do not count."""

    name: str
    title: str
    lines: Sequence[Line]

    @property
    def columns(self) -> list[str]:
        return list(self.lines[0]) if self.lines else []

    @property
    def cells(self) -> list[list[str]]:
        """As they are printed, everywhere."""
        return [[shown(line[column]) for column in self.columns] for line in self.lines]


def shown(cell: Cell) -> str:
    """Four significant digits, or all before the point. Empty where there is nothing."""
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, float):
        assert math.isfinite(cell), "a figure is a number, or it is not there"
        return f"{cell:.0f}" if abs(cell) >= 1000 else f"{cell:.4g}"
    return "" if cell is None else str(cell)


def all_tables(results: SweepResults) -> dict[str, Table]:
    """By name."""
    made = [gaps(results), rates(results), goodput(results), ratios(results), phases(results)]
    return {table.name: table for table in made}


def gaps(results: SweepResults) -> Table:
    return Table("gaps", "What is missing, or does not count", results.gaps)


def rates(results: SweepResults) -> Table:
    """Every run: latencies, throughput, attainment and effective throughput (EPD-Serve Figs. 8 to 15, Table 5)."""
    metrics = [TTFT, TTFT_P99, TPOT, TPOT_P99, THROUGHPUT, THROUGHPUT_PER_DEVICE]
    metrics += [metric for slo in results.experiment.slos for metric in (attainment(slo), effective_per_device(slo))]
    counted = ("requests", "ok", "error", "truncated", "timeout", "offered_rps", "answered_rps")
    lines = [
        {
            **_head(results, run),
            **{one.label: one.of(run) for one in metrics},
            **{name: run.figure(name) for name in counted},
            "valid": run.valid,
        }
        for run in results.runs
    ]
    return Table("rates", "Deployments at each rate", lines)


def goodput_of(results: SweepResults, deployment: Deployment, slo: Slo) -> tuple[float | None, float | None]:
    """(highest measured rate that attains `slo`, lowest measured rate above it that misses); of valid runs only.

    None: no such rate was measured. There is no interpolation: a rate nobody measured is no goodput.
    """
    known = [(run.rate, attainment(slo).of(run)) for run in results.of(deployment) if run.valid]
    shares = {rate: share for rate, share in known if share is not None}
    reached = max((rate for rate, share in shares.items() if share >= GOOD_SHARE), default=None)
    above = [rate for rate, share in shares.items() if share < GOOD_SHARE and rate > (reached or 0.0)]
    return reached, min(above, default=None)


def goodput(results: SweepResults) -> Table:
    lines = []
    for slo, one in product(results.experiment.slos, results.experiment.deployments):
        reached, missed = goodput_of(results, one, slo)
        each = None if reached is None else reached / (1 if results.experiment.per_device else one.devices)
        line: Line = {"deployment": one.name, "devices": one.devices, "objective (TTFT:TPOT, ms)": str(slo)}
        figures = {"goodput (req/s)": reached, "goodput per device (req/s)": each, "next rate, which misses": missed}
        lines += [{**line, **figures}] if results.of(one) else []
    return Table("goodput", "Goodput", lines)


def ratios(results: SweepResults) -> Table:
    """Every valid run over plain vLLM's and over the monoliths' at its rate, as `bench.sweep.compared` has them."""
    valid = [run for run in results.runs if run.valid]
    named = {f"{run.deployment.name}/{run.row.run}/{name}": of for run in valid for name, of in run.figures.items()}
    found = compared(results.experiment, named)
    names = sorted({name.rpartition("/")[2] for name in found if "_over_" in name})
    lines = []
    for run in valid:
        own = {name: found.get(f"{run.deployment.name}/{run.row.run}/{name}") for name in names}
        lines += [{**_head(results, run), **own}] if any(own.values()) else []
    return Table("ratios", "Ratios to plain vLLM and to the monoliths on as many devices", lines)


def phases(results: SweepResults) -> Table:
    """Every phase of a request, HydraInfer's eight among them (Figs. 11 and 13), and how the migrations do."""
    traced = [(run, run.phases) for run in results.runs if run.phases is not None and run.valid]
    lines = [{**_head(results, run), **row} for run, of in traced for row in phase_rows(of)]
    return Table("phases", "Every phase of a request", lines)


def facts(results: SweepResults) -> dict[str, Any]:
    """How it was measured: what was asked, and of the environments each different value once."""
    found = {name: value for name, value in results.experiment.to_json().items() if name != "deployments"}
    found |= {
        "deployments": [f"{one.label}: {one.layout} {' '.join(one.flags)}" for one in results.experiment.deployments],
        "slos": [str(slo) for slo in results.experiment.slos],
        "runs": len(results.runs),
        "requests": sum(len(run.requests) for run in results.runs),
    }
    for name in ("command", "commit", "uncommitted_changes", "date"):
        found[name] = "; ".join(dict.fromkeys(str(env[name]) for env in results.envs.values() if name in env))
    return found


def _head(results: SweepResults, run: Run) -> dict[str, Cell]:
    name, devices = run.deployment.name, run.deployment.devices
    return {"deployment": name, "devices": devices, results.experiment.rate_axis: run.rate}
