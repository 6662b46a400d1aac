"""Attainment, throughput, TTFT and TPOT against rate: EPD-Serve's Figs. 8-15, and the table below each.

Lines run through valid runs. A run that is not valid is a hollow marker with a cross, on no line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.report.experiment import Entry, Experiment, Run
from bench.report.measures import (
    THROUGHPUT,
    THROUGHPUT_PER_DEVICE,
    TPOT,
    TPOT_P99,
    TTFT,
    TTFT_P99,
    Measure,
    attainment,
)
from bench.report.sheet import Cell, Sheet
from bench.report.style import FAINT, finish, legend, line, new_figure, nothing, scale, styles, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GOOD_SHARE = 90.0
"""Percent of requests within the objective at which a rate counts as goodput (HydraInfer §5.2, DistServe)."""


NOT_VALID = "not valid: left out of lines and ranks"


@dataclass(frozen=True)
class Curves:
    """A figure of one panel per measure, against rate."""

    name: str
    title: str
    measures: tuple[Measure, ...]


def figures(experiment: Experiment) -> list[Curves]:
    """Those that every experiment has."""
    slos = tuple(attainment(slo) for slo in experiment.slos)
    return [
        Curves("attainment", "SLO attainment against request rate", slos),
        Curves("throughput", "Throughput against request rate", (THROUGHPUT, THROUGHPUT_PER_DEVICE)),
        Curves("ttft", "Time to first token (TTFT) against request rate", (TTFT, TTFT_P99)),
        Curves("tpot", "Time per output token (TPOT) against request rate", (TPOT, TPOT_P99)),
    ]


def points(experiment: Experiment, entry: Entry, measure: Measure) -> list[tuple[float, float, Run]]:
    """(rate, value, run) where there is one, by rate."""
    found = []
    for rate in experiment.measured_rates:
        run = experiment.at(entry, rate)
        value = None if run is None else measure.of(entry, run)
        if run is not None and value is not None:
            found.append((rate, value, run))
    return found


def sheet(experiment: Experiment, curves: Curves) -> Sheet:
    """A row per entry and rate."""
    rows: list[tuple[Cell, ...]] = []
    faint = set()
    for entry in experiment.entries:
        for rate in experiment.measured_rates:
            run = experiment.at(entry, rate)
            if run is None:
                continue
            if not run.valid:
                faint.add(len(rows))
            values = [measure.of(entry, run) for measure in curves.measures]
            rows.append((entry.name, entry.devices, rate, *values, run.valid))
    columns = ("deployment", "devices", experiment.rate_words, *(one.label for one in curves.measures), "valid")
    return Sheet(curves.name, curves.title, columns, tuple(rows), faint=frozenset(faint))


def draw(experiment: Experiment, curves: Curves, path: Path) -> None:
    """Write the PNG."""
    count = len(curves.measures)
    figure = new_figure(max(7.5, 4.6 * count), 4.9 + 0.25 * (len(experiment.entries) // 4))
    axes = figure.subplots(1, count, squeeze=False)[0]
    for ax, measure in zip(axes, curves.measures, strict=True):
        _panel(ax, experiment, measure)
    legend(figure, axes, experiment)
    finish(figure, experiment, curves.title, path)


def _panel(ax: Axes, experiment: Experiment, measure: Measure) -> None:
    look = styles(experiment.entries)
    every: list[float] = []
    for entry in experiment.entries:
        found, own = points(experiment, entry, measure), look[entry.name]
        valid = [(rate, value) for rate, value, run in found if run.valid]
        every += [value for _, value, _ in found]
        if valid:
            ax.plot(*zip(*valid, strict=True), label=entry.known_as, **line(experiment, entry))
        _crossed(ax, [(rate, value) for rate, value, run in found if not run.valid], own.colour, own.marker)
    percent = measure.unit == "%"
    tidy(ax, experiment.rate_words, "requests (%)" if percent else measure.label, _title(measure))
    if not every:
        nothing(ax, "no run has this figure")
    elif percent:
        ax.set_ylim(-3, 105)
        ax.axhline(GOOD_SHARE, color=FAINT, linestyle=(0, (1, 2)), linewidth=1.2, label=f"{GOOD_SHARE:g} %: goodput")
    else:
        scale(ax, every, log=measure.lower)
    rates = experiment.measured_rates
    if 0 < len(rates) <= 8:
        ax.set_xticks(rates, [f"{rate:g}" for rate in rates])


def _crossed(ax: Axes, found: Sequence[tuple[float, float]], colour: str, marker: str) -> None:
    if not found:
        return
    rates, values = zip(*found, strict=True)
    ax.scatter(rates, values, s=70, marker=marker, facecolors="none", edgecolors=colour, linewidths=1.0)
    ax.scatter(rates, values, s=40, marker="x", color=FAINT, linewidths=1.4, label=NOT_VALID)


def _title(measure: Measure) -> str:
    return measure.name.removeprefix("SLO attainment, ")
