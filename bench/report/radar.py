"""Ranks by rate for TTFT, TPOT and throughput: EPD-Serve's Fig. 17. Rank 1 is the outermost ring.

Throughput is ranked per device: entries of more devices are not to win by them. Fewer than three rates make no radar;
then ranks are drawn against rate.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.report.experiment import Experiment
from bench.report.measures import THROUGHPUT_PER_DEVICE, TPOT, TTFT, Measure, ranks
from bench.report.sheet import Cell, Sheet
from bench.report.style import INK, finish, legend, line, new_figure, nothing, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MEASURES = (TTFT, TPOT, THROUGHPUT_PER_DEVICE)
LEAST_SPOKES = 3
APART = 0.07
"""By which lines of equal rank are set apart."""


NOTE = (
    "1 is the best; equals share the better rank. A rank says nothing of how far apart two are: at rates that all "
    "serve, throughput is ranked by chance."
)


def sheet(experiment: Experiment) -> Sheet:
    """A row per entry and rate; a run that is not valid has no rank."""
    rows: list[tuple[Cell, ...]] = []
    for entry in experiment.entries:
        for rate in experiment.measured_rates:
            if experiment.at(entry, rate) is not None:
                of = [ranks(experiment, measure, rate).get(entry.name) for measure in MEASURES]
                rows.append((entry.name, entry.devices, rate, *of))
    columns = ("deployment", "devices", experiment.rate_words, *(f"rank by {one.name}" for one in MEASURES))
    return Sheet("ranks", "Ranks by rate", columns, tuple(rows), note=NOTE)


def draw(experiment: Experiment, path: Path) -> None:
    """Three panels."""
    rates = experiment.measured_rates
    radar = len(rates) >= LEAST_SPOKES
    figure = new_figure(13.2, 5.6 + 0.25 * (len(experiment.entries) // 4))
    axes = figure.subplots(1, len(MEASURES), squeeze=False, subplot_kw={"projection": "polar"} if radar else {})[0]
    for ax, measure in zip(axes, MEASURES, strict=True):
        (_radar if radar else _lines)(ax, experiment, measure)
    legend(figure, axes, experiment)
    where = "the outermost ring" if radar else "above"
    finish(figure, experiment, f"Ranks by request rate; 1, the best, is {where}", path)


def _radar(ax: Axes, experiment: Experiment, measure: Measure) -> None:
    rates, last = experiment.measured_rates, max(1, len(experiment.entries))
    angles = [2 * math.pi * n / len(rates) for n in range(len(rates))]
    by_rate = [ranks(experiment, measure, rate) for rate in rates]
    for place, entry in enumerate(experiment.entries):
        apart = APART * (place - (last - 1) / 2)
        heights = [last + 1 - of[entry.name] + apart if entry.name in of else math.nan for of in by_rate]
        if all(math.isnan(height) for height in heights):
            continue
        ax.plot([*angles, angles[0]], [*heights, heights[0]], label=entry.known_as, **line(experiment, entry))
    polar: Any = ax
    polar.set_theta_offset(math.pi / 2)
    polar.set_theta_direction(-1)
    ax.set_xticks(angles, [f"{rate:g}" for rate in rates], fontsize=9)
    ax.set_ylim(0, last + 0.6)
    ax.set_yticks(range(1, last + 1), [str(last + 1 - ring) for ring in range(1, last + 1)], fontsize=8, color=INK)
    polar.set_rlabel_position(180 / len(rates))
    ax.grid(color="#CCCCCC", linewidth=0.7)
    ax.spines["polar"].set_visible(False)
    ax.set_title(f"{measure.name}\nspokes: {experiment.rate_words}", fontsize=10, color=INK)


def _lines(ax: Axes, experiment: Experiment, measure: Measure) -> None:
    rates, last = experiment.measured_rates, max(1, len(experiment.entries))
    found = False
    for place, entry in enumerate(experiment.entries):
        of = [(rate, ranks(experiment, measure, rate).get(entry.name)) for rate in rates]
        known = [(rate, rank + APART * (place - (last - 1) / 2)) for rate, rank in of if rank is not None]
        if not known:
            continue
        found = True
        ax.plot(*zip(*known, strict=True), label=entry.known_as, **line(experiment, entry))
    tidy(ax, experiment.rate_words, "rank", measure.name)
    ax.set_ylim(last + 0.5, 0.5)
    ax.set_yticks(range(1, last + 1))
    if rates:
        ax.set_xticks(rates, [f"{rate:g}" for rate in rates])
        ax.margins(x=0.25)
    if not found:
        nothing(ax, "no valid run")
