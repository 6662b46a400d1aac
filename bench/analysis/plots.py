"""The figures of a comparison, one function each over its runs (EPD-Serve Figs. 8 to 15, HydraInfer Figs. 11, 13).

A deployment has one colour, marker and line in all of them; colours are Okabe and Ito's, which colour-blind people tell
apart. Every figure says below what kind of measurement it is, of what and on what. A run that is not valid is a hollow
marker with a cross, on no line. Matplotlib is imported where something is drawn.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
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
from bench.sweep.experiment import Deployment
from epd_serve.phases.phase import Phase

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ORANGE, GREEN, BLUE = "#E69F00", "#009E73", "#0072B2"
COLOURS = ("#000000", BLUE, ORANGE, GREEN, "#D55E00", "#56B4E9", "#CC79A7", "#B8A800")
MARKERS = ("s", "o", "^", "D", "v", "P", "X", "*", "<", ">")
LINES = ("--", "-", "-.", "-", ":", "-", (0, (3, 1, 1, 1, 1, 1)))
INK, FAINT = "#333333", "#767676"
STYLE = {
    "figure.dpi": 130,
    "figure.constrained_layout.use": True,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#DDDDDD",
    "legend.fontsize": 9,
    "legend.title_fontsize": 8,
    "legend.frameon": False,
}
LOG_SPAN = 20.0
"""Largest over smallest value from which an axis of times is logarithmic."""
SMALL = 0.045
"""Share of the axis below which a part of a bar has no number in it."""
_FRONT = tuple(phase for phase in Phase if phase.value.split()[0] in ("HTTP", "preprocess", "answer"))
_AROUND = (Phase.CLIENT, Phase.HTTP_CLIENT, Phase.PROXY, Phase.PROXY_QUEUE, Phase.FAILED, Phase.DOWNLOAD)
PARTS: dict[str, tuple[tuple[Phase, ...], str, str]] = {
    "client and proxy": (_AROUND, "#9A9A9A", ""),
    "front ends of the stages": ((*_FRONT, Phase.DECODE_MEDIA), "#C9B8DC", ""),
    "encode queue": ((Phase.ENCODE_QUEUE,), "#F8DFA8", "////"),
    "encode": ((Phase.ENCODE,), ORANGE, ""),
    "E→P": ((Phase.EP,), "#C77B00", "xxxx"),
    "prefill queue": ((Phase.PREFILL_QUEUE,), "#A9CDE6", "////"),
    "prefill": ((Phase.PREFILL,), BLUE, ""),
    "P→D": ((Phase.PD,), "#00466F", "xxxx"),
    "decode queue": ((Phase.DECODE_QUEUE,), "#A6DCCB", "////"),
    "stages, not told apart": ((Phase.STAGES,), "#D9D9D9", ".."),
    "decode": ((Phase.FIRST_TOKEN, Phase.DECODE), GREEN, ""),
}
"""Colour and hatch: stages have a colour each, queues and transfers are hatched."""

Drawing = tuple[str, Callable[["Figure"], None]]
"""A figure's title, and what fills it."""


def all_figures(results: SweepResults, rate: float | None) -> dict[str, Drawing]:
    """By the name of its file. `rate`: of the phases."""
    slos = tuple(attainment(slo) for slo in results.experiment.slos)
    made: dict[str, Drawing] = {
        "attainment": ("SLO attainment against request rate", partial(curves, results, slos)),
        "throughput": (
            "Throughput against request rate",
            partial(curves, results, (THROUGHPUT, THROUGHPUT_PER_DEVICE)),
        ),
        "ttft": ("Time to first token (TTFT) against request rate", partial(curves, results, (TTFT, TTFT_P99))),
        "tpot": ("Time per output token (TPOT) against request rate", partial(curves, results, (TPOT, TPOT_P99))),
    }
    if rate is not None and any(run.phases for run in results.runs if run.rate == rate and run.valid):
        made["phases"] = (f"Phases of a request at {rate:g} req/s", partial(phases, results, rate))
    return made


def save(results: SweepResults, drawing: Drawing, path: Path) -> None:
    """Draw a figure into a PNG: its title above, one legend below all panels, and what it is of."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no display, and no state of pyplot's
    from matplotlib.figure import Figure

    title, fill = drawing
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12.0, 5.6))
        fill(figure)
        figure.suptitle(title, color=INK)
        seen: dict[str, Any] = {}
        for ax in figure.axes:
            handles, labels = ax.get_legend_handles_labels()
            seen = {**dict(zip(labels, handles, strict=True)), **seen}
        width_in = 0.068 * max(map(len, seen), default=1) + 0.72
        look = {"loc": "outside lower center", "ncols": max(1, min(6, int(figure.get_figwidth() / width_in)))}
        legend = figure.legend(list(seen.values()), list(seen), title=footer(results), **look)
        legend.get_title().set_color(FAINT)
        FigureCanvasAgg(figure).print_png(str(path))


def footer(results: SweepResults) -> str:
    """Kind, workload, machine and commit."""
    experiment, env = results.experiment, next(iter(results.envs.values()), {})
    machine = experiment.machine
    words = [experiment.kind, f"workload {experiment.workload}", f"{machine.get('cpu')}, {machine.get('cores')} cores"]
    return "\n".join(textwrap.wrap(" · ".join([*words, f"commit {env.get('commit')}"]), 190))


def curves(results: SweepResults, metrics: Sequence[Metric], figure: Figure) -> None:
    """Metrics against rate, a panel each (EPD-Serve Figs. 8 to 15)."""
    figure.set_size_inches(max(9.2, 4.6 * len(metrics)), 5.4)
    for ax, metric in zip(figure.subplots(1, len(metrics), squeeze=False)[0], metrics, strict=True):
        every = [value for run in results.runs if (value := metric.of(run)) is not None]
        for one in results.experiment.deployments:
            look = _look(results, one)
            _line(ax, [(run.rate, metric.of(run)) for run in results.of(one) if run.valid], **look)
            invalid = [(run.rate, metric.of(run)) for run in results.of(one) if not run.valid]
            _line(ax, invalid, **look | {"linestyle": "", "fillstyle": "none", "label": None})
            _line(ax, invalid, linestyle="", marker="x", color=FAINT, label="not valid")
        ax.set(xlabel=results.experiment.rate_axis, ylabel=metric.unit, title=textwrap.fill(metric.name, 40))
        ax.set_xticks(results.rates)
        if metric.unit == "%":
            ax.set_ylim(-3, 105)
            ax.axhline(GOOD_SHARE, color=FAINT, linestyle=":", linewidth=1.2, label=f"{GOOD_SHARE:g} %: goodput")
        else:
            _from_zero(ax, every, log=metric.unit == "ms")


def phases(results: SweepResults, rate: float, figure: Figure) -> None:
    """Stacked bars of exposed times, one per deployment: left the TTFT, right the whole request (HydraInfer v1 Fig. 13,
    v2 Fig. 11)."""
    known = [(run, run.phases) for run in results.runs if run.rate == rate and run.valid and run.phases]
    figure.set_size_inches(13.0, 3.0 + 0.52 * max(2, len(known)))
    axes = figure.subplots(1, 2, sharey=True)
    whole: list[Mapping[Phase, float]] = [of.exposed for _, of in known]
    first: list[Mapping[Phase, float]] = [
        {phase: ms for phase, ms in stack.items() if phase is not Phase.DECODE} for stack in whole
    ]
    for ax, stacks in zip(axes, (first, whole), strict=True):
        longest, left = max(sum(stack.values()) for stack in stacks), [0.0] * len(stacks)
        for label, (parts, colour, hatch) in PARTS.items():
            widths = [sum(stack.get(phase, 0.0) for phase in parts) for stack in stacks]
            if not any(widths):
                continue
            edge = INK if hatch else "white"
            bars = ax.barh(
                range(len(stacks)), widths, 0.66, left, color=colour, hatch=hatch, edgecolor=edge, label=label
            )
            numbers = [f"{width:.0f}" if width > SMALL * longest and not hatch else "" for width in widths]
            ax.bar_label(
                bars, numbers, label_type="center", fontsize=8, color="white" if colour in (BLUE, GREEN) else "black"
            )
            left = [begun + width for begun, width in zip(left, widths, strict=True)]
        ax.bar_label(bars, [f" {total:.0f}" for total in left], fontsize=8, fontweight="bold", color=INK)
        ax.set(xlabel="mean, ms", xlim=(0, longest * 1.1), ylim=(len(stacks) - 0.45, -0.55))
        ax.set_yticks(range(len(stacks)), [run.deployment.label.replace(", ", "\n") for run, _ in known])
        ax.set_title("Time to first token" if stacks is first else "Whole request")
        ax.grid(visible=False, axis="y")


def _look(results: SweepResults, deployment: Deployment) -> dict[str, Any]:
    """Keywords of `Axes.plot`. The numbers of colours, markers and lines have no common divisor that matters, so that
    pairs repeat late."""
    at = results.experiment.deployments.index(deployment)
    colour, marker, line = (looks[at % len(looks)] for looks in (COLOURS, MARKERS, LINES))
    return {"color": colour, "marker": marker, "linestyle": line, "label": deployment.label}


def _line(ax: Axes, points: Sequence[tuple[float, float | None]], **look: Any) -> None:
    """Through the points that have a value."""
    if known := [(x, y) for x, y in points if y is not None]:
        ax.plot(*zip(*known, strict=True), **look)


def _from_zero(ax: Axes, values: Sequence[float], *, log: bool) -> None:
    """An axis from 0; logarithmic, with plain numbers at 1, 2 and 5, where values span much and `log` allows it."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    if not (log and values and min(values) > 0 and max(values) > LOG_SPAN * min(values)):
        ax.set_ylim(0, max([1e-9, *values]) * 1.08)
        return
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    ax.yaxis.set_minor_locator(NullLocator())
