"""The tables of a comparison: each rate, Table 5, goodput, the best, ratios, phases, batches, runs. Pure.

A table is written as CSV and shown in the page with the same digits. Runs that are not valid are in it, and in no rank,
ratio or best.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from bench.analysis.ratios import run_ratio
from bench.analysis.sweep_results import (
    LATENCIES,
    RANKED,
    THROUGHPUT,
    THROUGHPUT_PER_DEVICE,
    Metric,
    Run,
    SweepResults,
    attainment,
    compared_by,
    effective_per_device,
    ranked,
    ranks,
)
from bench.phases import Breakdown, phase_rows
from bench.sweep.experiment import Deployment
from epd_serve.errors import ConfigError
from epd_serve.layout_parser import parse
from epd_serve.roles import Role
from epd_serve.slo import Slo

GOOD_SHARE = 90.0
"""Percent of requests within the objective at which a rate counts as goodput (HydraInfer §5.2, DistServe)."""

Cell = str | int | float | bool | None
Line = Mapping[str, Cell]
"""By column; a column's name has its unit, as `mean TTFT (ms)`. None where there is no number."""


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        name: of its CSV file, without the ending.
        lines: all with the same columns. Those whose `valid` is False do not count.
        long: too long for a page, which then only names its file.
    """

    name: str
    title: str
    lines: Sequence[Line]
    long: bool = False

    @property
    def columns(self) -> list[str]:
        return list(self.lines[0]) if self.lines else []

    @property
    def cells(self) -> list[list[str]]:
        """As they are printed, everywhere."""
        return [[shown(line[column]) for column in self.columns] for line in self.lines]

    def csv(self, kind: str) -> str:
        """With a last column that says what kind of measurement this is."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(
            [[*self.columns, "kind"], *([*line, kind] for line in self.cells)]
        )
        return text.getvalue()


def shown(cell: Cell) -> str:
    """Four significant digits, or all before the point; never an exponent. Empty where there is nothing."""
    if cell is None or (isinstance(cell, str | int) and not isinstance(cell, bool)):
        return "" if cell is None else str(cell)
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    assert math.isfinite(cell), "a figure is a number, or it is not there"
    digits = max(0, 3 - math.floor(math.log10(abs(cell)))) if cell else 0
    text = f"{cell:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def chosen_rate(results: SweepResults, wanted: float | None = None) -> float | None:
    """The rate of Table 5 and of the phases: `wanted`, else the highest that half of the deployments have validly.

    Raises:
        ConfigError: nothing was measured at `wanted`.
    """
    if wanted is not None and wanted not in results.rates:
        measured = ", ".join(f"{rate:g}" for rate in results.rates) or "none"
        raise ConfigError(f"--rate {wanted:g}: nothing was measured at it, but at {measured}", param="--rate")
    measured_ones = len({run.deployment for run in results.runs})
    known = [
        rate
        for rate in results.rates
        if 2 * sum(run.valid for run in results.runs if run.rate == rate) >= measured_ones
    ]
    return max(known, default=max(results.rates, default=None)) if wanted is None else wanted


def all_tables(results: SweepResults, rate: float | None) -> dict[str, Table]:
    """By name. `rate`: of Table 5; None where there is no run."""
    made = [gaps(results), best(results), rates(results), goodput(results), ratios(results)]
    made += [phases(results), batches(results), deployments(results)]
    made += [table5(results, rate)] if rate is not None else []
    return {table.name: table for table in made}


def gaps(results: SweepResults) -> Table:
    return Table("gaps", "What is missing, or does not count", results.gaps)


def rates(results: SweepResults) -> Table:
    """Every run: latencies, throughput and attainment, ranks (EPD-Serve Figs. 8 to 15 and 17), and its requests."""
    metrics = (*LATENCIES, THROUGHPUT, THROUGHPUT_PER_DEVICE, *_objectives(results))
    counted = ("requests", "ok", "error", "truncated", "timeout", "offered_rps", "answered_rps")
    places = {(metric, rate): ranks(results, metric, rate) for metric, rate in product(RANKED, results.rates)}
    lines = [
        _line(
            results,
            run,
            {one.label: one.of(run) for one in metrics},
            {f"rank by {one.name}": places[one, run.rate].get(run.deployment.name) for one in RANKED},
            {name: run.figure(name) for name in counted},
        )
        for run in results.runs
    ]
    return Table("rates", "Deployments at each rate", lines)


def table5(results: SweepResults, rate: float) -> Table:
    """EPD-Serve's Table 5 at `rate`: attainment and effective throughput within each objective."""
    metrics = (*LATENCIES, *_objectives(results))
    own = [run for run in results.runs if run.rate == rate]
    lines = [_line(results, run, {one.label: one.of(run) for one in metrics}) for run in own]
    return Table("table5", f"Deployments at {rate:g} req/s (EPD-Serve Table 5)", lines)


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


def monolith(results: SweepResults) -> Deployment | None:
    """What the others are compared to: a baseline of whole instances, else any deployment of such.

    Of several the one whose device count the most deployments have. None where there is none that was measured.
    """
    counts = [one.devices for one in results.experiment.deployments]
    whole = [one for one in results.experiment.deployments if parse(one.layout).roles == {Role.EPD} and results.of(one)]
    return max(whole, key=lambda one: (one.baseline, counts.count(one.devices)), default=None)


def best(results: SweepResults) -> Table:
    """The first two at each metric and rate, and the first over the second."""
    against = monolith(results)
    lines = []
    for metric, rate in product(compared_by(results.experiment.slos[0]), results.rates):
        order = ranked(results, metric, rate, against.devices if against else None)
        if len(order) > 1:
            (first, value), (second, other) = order[:2]
            line: dict[str, Cell] = {"metric": metric.label, results.experiment.rate_axis: rate}
            line |= {"best": first.deployment.name, "its value": value}
            line |= {"second": second.deployment.name, "value of the second": other}
            line |= _ratio(metric, first, second, "best over second")
            lines.append(line)
    among = f" (of {against.devices} devices, as the monolith)" if against else ""
    return Table("best", f"The best by metric and rate{among}", lines)


def ratios(results: SweepResults) -> Table:
    """Every deployment over the monolith."""
    against = monolith(results)
    lines = [
        {**_head(results, run), "metric": metric.label, "its value": metric.of(run), "the monolith's": metric.of(base)}
        | _ratio(metric, run, base, "ratio")
        for metric, run in product(compared_by(results.experiment.slos[0]), results.runs)
        if against and run.valid and run.deployment != against
        if (base := results.at(against, run.rate)) and metric.of(run) is not None and metric.of(base)
    ]
    name = against.label if against else "none was measured"
    return Table("ratios", f"Ratios to the monolith ({name})", lines)


def _ratio(metric: Metric, run: Run, base: Run, name: str) -> dict[str, Cell]:
    """Columns of the ratio of two runs that both have the metric, its interval (95 %), and what that says."""
    found = run_ratio(metric.figure, base, run)
    cells = (found.ratio, found.low, found.high, found.verdict) if found else (None,) * 4
    return dict(zip((name, f"{name}: from", f"{name}: to", f"{name}: is"), cells, strict=True))


def phases(results: SweepResults) -> Table:
    """Every phase of a request, HydraInfer's eight among them (Figs. 11 and 13), and how the migrations do."""
    lines = [{**_head(results, run), **row} for run, of in _traced(results) for row in phase_rows(of)]
    return Table("phases", "Every phase of a request", lines, long=True)


def _traced(results: SweepResults) -> list[tuple[Run, Breakdown]]:
    return [(run, run.phases) for run in results.runs if run.phases is not None and run.valid]


def batches(results: SweepResults) -> Table:
    lines = [
        _line(results, run, {"role": role}, {name: run.figure(f"batch/{role}/{of}") for name, of in BATCHES.items()})
        for run in results.runs
        for role in run.roles
    ]
    return Table("batches", "Sequences that an instance runs at once (after HydraInfer Figs. 3 and 6)", lines)


BATCHES = {
    "running, mean (sequences)": "running/mean",
    "running, P10": "running/p10",
    "running, P90": "running/p90",
    "waiting, mean (sequences)": "waiting",
}


def deployments(results: SweepResults) -> Table:
    lines = [
        {
            "deployment": one.name,
            "layout": one.layout,
            "devices": one.devices,
            "served by": str(one.served_by),
            "ready after (s)": results.envs.get(one.name, {}).get("deployment", {}).get("ready_s"),
            "runs": len(results.of(one)),
            "flags": " ".join(one.flags),
        }
        for one in results.experiment.deployments
    ]
    return Table("deployments", "Deployments", lines)


def facts(results: SweepResults) -> dict[str, Any]:
    """How it was measured: what was asked, and of the environments each different value once."""
    found = {name: value for name, value in results.experiment.to_json().items() if name != "deployments"}
    found |= {
        "slos": [str(slo) for slo in results.experiment.slos],
        "runs": len(results.runs),
        "requests": sum(len(run.requests) for run in results.runs),
    }
    for name in ("command", "commit", "uncommitted_changes", "date"):
        found[name] = "; ".join(dict.fromkeys(str(env[name]) for env in results.envs.values() if name in env))
    return found


def _objectives(results: SweepResults) -> list[Any]:
    return [metric for slo in results.experiment.slos for metric in (attainment(slo), effective_per_device(slo))]


def _head(results: SweepResults, run: Run) -> dict[str, Cell]:
    name, devices = run.deployment.name, run.deployment.devices
    return {"deployment": name, "devices": devices, results.experiment.rate_axis: run.rate}


def _line(results: SweepResults, run: Run, *parts: Line) -> dict[str, Cell]:
    """Of one run; its last column says whether the run is valid."""
    line = _head(results, run)
    for part in parts:
        line |= part
    return {**line, "valid": run.valid}
