"""TTFT and TPOT of every request by rate, with the best three deployments of each rate named: EPD-Serve's Fig. 16."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.client.row import Row
from bench.report.experiment import Entry, Experiment
from bench.report.measures import TPOT, TTFT, Measure, ranked
from bench.report.sheet import Sheet
from bench.report.style import FAINT, finish, legend, logarithmic, new_figure, nothing, spans, styles, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAMED = 3
ACROSS = 4
"""Panels beside each other, at most."""


@dataclass(frozen=True)
class Dots:
    """A figure: which time of a request, and by which measure a rate's best are named."""

    name: str
    title: str
    measure: Measure
    short: str

    def ms(self, row: Row) -> float | None:
        seconds = row.ttft_s if self.short == "TTFT" else row.tpot_s
        return None if seconds is None or not row.ok else seconds * 1e3


FIGURES = (
    Dots("scatter-ttft", "TTFT of all requests by rate", TTFT, "TTFT"),
    Dots("scatter-tpot", "TPOT of all requests by rate", TPOT, "TPOT"),
)


def by_rate(
    experiment: Experiment, rows: Mapping[str, Sequence[Row]], dots: Dots
) -> dict[float, dict[str, list[tuple[float, float]]]]:
    """By rate and entry's name, (seconds since the run's first request was due, ms) of each whole answer."""
    found: dict[float, dict[str, list[tuple[float, float]]]] = {}
    for rate in experiment.measured_rates:
        found[rate] = {}
        for entry in experiment.entries:
            run = experiment.at(entry, rate)
            own = [row for row in rows.get(entry.name, ()) if run is not None and row.run == run.label]
            begun = min((row.due_s for row in own), default=0.0)
            found[rate][entry.name] = [(row.due_s - begun, ms) for row in own if (ms := dots.ms(row)) is not None]
    return found


def best(experiment: Experiment, dots: Dots, rate: float) -> list[tuple[Entry, float]]:
    """The best three at `rate`, of valid runs."""
    return [(entry, value) for entry, _, value in ranked(experiment, dots.measure, rate)[:NAMED]]


def sheet(experiment: Experiment, rows: Mapping[str, Sequence[Row]], dots: Dots) -> Sheet:
    """Every dot. It is too long for a page; what a page shows is `best_sheet`."""
    of_rate = by_rate(experiment, rows, dots)
    listed = tuple(
        (entry.name, entry.devices, rate, round(at, 3), round(ms, 3))
        for rate, found in of_rate.items()
        for entry in experiment.entries
        for at, ms in found[entry.name]
    )
    columns = ("deployment", "devices", experiment.rate_words, "due after (s)", f"{dots.short} (ms)")
    return Sheet(dots.name, dots.title, columns, listed, long=True)


def best_sheet(experiment: Experiment, dots: Dots) -> Sheet:
    """A row per rate: the best three, with their means."""
    listed = []
    for rate in experiment.measured_rates:
        found = best(experiment, dots, rate)
        words = [f"{entry.name} ({entry.devices})" for entry, _ in found]
        cells: list[str | float | None] = []
        for place in range(NAMED):
            cells += [words[place], found[place][1]] if place < len(found) else [None, None]
        listed.append((rate, *cells))
    ordinals = ("best", "second", "third")
    columns = [experiment.rate_words]
    for ordinal in ordinals[:NAMED]:
        columns += [f"{ordinal} (devices)", f"{dots.measure.name} (ms)"]
    title = f"Best three by {dots.measure.name}, of valid runs"
    return Sheet(f"{dots.name}-best", title, tuple(columns), tuple(listed))


def draw(experiment: Experiment, rows: Mapping[str, Sequence[Row]], dots: Dots, path: Path) -> None:
    """A panel per rate, all on one scale."""
    found = by_rate(experiment, rows, dots)
    across = max(1, min(ACROSS, len(found)))
    down = max(1, -(-len(found) // across))
    figure = new_figure(max(7.5, 3.6 * across), 3.1 * down + 1.7)
    axes = figure.subplots(down, across, squeeze=False, sharey=True)
    panels: list[Axes] = list(axes.flat)
    every = [ms for own in found.values() for dots_of in own.values() for _, ms in dots_of]
    log = spans(every)
    for place, (ax, rate) in enumerate(zip(panels, found, strict=False)):
        _panel(ax, experiment, dots, rate, found[rate])
        if log:
            logarithmic(ax)
        ax.set_ylabel(f"{dots.short} (ms)" if place % across == 0 else "", fontsize=9)
    for ax in panels[len(found) :]:
        ax.set_visible(False)
    if not found:
        panels[0].set_visible(True)
        nothing(panels[0], "no run has a rate")
    elif every and not log:
        panels[0].set_ylim(0, max(every) * 1.05)
    legend(figure, panels, experiment)
    finish(figure, experiment, f"{dots.title}; the best {NAMED} by mean are named", path)


def _panel(
    ax: Axes, experiment: Experiment, dots: Dots, rate: float, found: Mapping[str, Sequence[tuple[float, float]]]
) -> None:
    look = styles(experiment.entries)
    for entry in experiment.entries:
        if not found[entry.name]:
            continue
        at, ms = zip(*found[entry.name], strict=True)
        own = look[entry.name]
        ax.scatter(at, ms, s=16, marker=own.marker, color=own.colour, alpha=0.55, linewidths=0.0, label=entry.known_as)
    if not any(found.values()):
        nothing(ax, "no whole answer")
    named = [f"{place}. {entry.name}" for place, (entry, _) in enumerate(best(experiment, dots, rate), 1)]
    tidy(ax, "due after the run's start (s)", title=f"{rate:g} req/s")
    words = "\n".join(named) or "no valid run"
    box = {"facecolor": "white", "edgecolor": FAINT, "alpha": 0.85, "boxstyle": "round,pad=0.3", "linewidth": 0.6}
    ax.text(0.02, 0.98, words, transform=ax.transAxes, fontsize=7.5, va="top", ha="left", bbox=box)
