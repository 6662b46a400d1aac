"""The figures of a comparison: metrics against the rate (EPD-Serve Figs. 8 to 15), a panel each.

A deployment has one colour and marker in all of them; colours are Okabe and Ito's, told apart by colour-blind people.
Every figure says below what kind of measurement it is, of what and on what. A run that is not valid is a hollow marker
with a cross, on no line. Matplotlib is imported where something is drawn.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.analysis.sweep_results import (
    THROUGHPUT,
    THROUGHPUT_PER_DEVICE,
    TPOT,
    TPOT_P99,
    TTFT,
    TTFT_P99,
    Metric,
    SweepResults,
    attainment,
)
from bench.analysis.tables import GOOD_SHARE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#000000", "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#B8A800")
MARKERS = ("s", "o", "^", "D", "v", "P", "X", "*", "<", ">")
FAINT = "#767676"
STYLE = {
    "figure.dpi": 130,
    "figure.constrained_layout.use": True,
    "axes.titlesize": 10,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "legend.fontsize": 9,
    "legend.title_fontsize": 8,
    "legend.frameon": False,
}
LOG_SPAN = 20.0
"""Largest over smallest value from which an axis of times is logarithmic."""


def all_figures(results: SweepResults) -> Mapping[str, Sequence[Metric]]:
    """What each shows, by the name of its file."""
    return {
        "attainment": [attainment(slo) for slo in results.experiment.slos],
        "throughput": (THROUGHPUT, THROUGHPUT_PER_DEVICE),
        "ttft": (TTFT, TTFT_P99),
        "tpot": (TPOT, TPOT_P99),
    }


def save(results: SweepResults, metrics: Sequence[Metric], path: Path) -> None:
    """Draw a figure into a PNG: a panel per metric, one legend below all of them, and what it is of."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no display, and no state of pyplot's
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(max(9.2, 4.6 * len(metrics)), 5.4))
        for ax, metric in zip(figure.subplots(1, len(metrics), squeeze=False)[0], metrics, strict=True):
            _panel(ax, results, metric)
        seen: dict[str, Any] = {}
        for ax in figure.axes:
            handles, labels = ax.get_legend_handles_labels()
            seen = {**dict(zip(labels, handles, strict=True)), **seen}
        figure.legend([*seen.values()], [*seen], title=footer(results), loc="outside lower center", ncols=4)
        FigureCanvasAgg(figure).print_png(str(path))


def footer(results: SweepResults) -> str:
    """Kind, workload, machine and commit."""
    experiment, env = results.experiment, next(iter(results.envs.values()), {})
    machine = experiment.machine
    words = [experiment.kind, f"workload {experiment.workload}", f"{machine.get('cpu')}, {machine.get('cores')} cores"]
    return "\n".join(textwrap.wrap(" · ".join([*words, f"commit {env.get('commit')}"]), 190))


def _panel(ax: Axes, results: SweepResults, metric: Metric) -> None:
    for at, one in enumerate(results.experiment.deployments):
        look: dict[str, Any] = {"color": COLOURS[at % len(COLOURS)], "marker": MARKERS[at % len(MARKERS)]}
        points = [(run.rate, value, run.valid) for run in results.of(one) if (value := metric.of(run)) is not None]
        valid = [(rate, value) for rate, value, good in points if good]
        invalid = [(rate, value) for rate, value, good in points if not good]
        if valid:
            ax.plot(*zip(*valid, strict=True), label=one.label, **look)
        if invalid:
            ax.plot(*zip(*invalid, strict=True), linestyle="", fillstyle="none", **look)
            ax.plot(*zip(*invalid, strict=True), linestyle="", marker="x", color=FAINT, label="not valid")
    ax.set(xlabel=results.experiment.rate_axis, ylabel=metric.unit, title=textwrap.fill(metric.name, 40))
    ax.set_xticks(results.rates)
    every = [value for run in results.runs if (value := metric.of(run)) is not None]
    if metric.unit == "%":
        ax.set_ylim(-3, 105)
        ax.axhline(GOOD_SHARE, color=FAINT, linestyle=":", label=f"{GOOD_SHARE:g} %: goodput")
    elif metric.unit == "ms" and every and 0 < LOG_SPAN * min(every) < max(every):
        ax.set_yscale("log")
    else:
        ax.set_ylim(bottom=0)
