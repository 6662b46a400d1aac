"""Stacked bars of the phases, one bar per deployment, and their table (HydraInfer v1 Fig. 13, v2 Fig. 11).

Left what the TTFT consists of, right the whole request. Stages have a colour each, queues are hatched.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from bench.report.breakdown import EIGHT, Found, Phase
from bench.report.experiment import Experiment
from bench.report.sheet import Cell, Sheet
from bench.report.style import BLUE, GREEN, INK, ORANGE, finish, legend, new_figure, nothing, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GREY, PALE = "#9A9A9A", "#D9D9D9"
LOOKS: Mapping[Phase, tuple[str, str]] = {
    Phase.OUTSIDE: (GREY, ""),
    Phase.ENCODE_QUEUE: ("#F8DFA8", "////"),
    Phase.ENCODE: (ORANGE, ""),
    Phase.EP_TRANSFER: ("#C77B00", "xxxx"),
    Phase.ENCODER: ("#F3C766", ".."),
    Phase.PREFILL_QUEUE: ("#A9CDE6", "////"),
    Phase.PREFILL: (BLUE, ""),
    Phase.PD_TRANSFER: ("#00466F", "xxxx"),
    Phase.DECODE_QUEUE: ("#A6DCCB", "////"),
    Phase.WHOLE: (PALE, ".."),
    Phase.FIRST_STEP: (GREEN, ""),
    Phase.DECODE: (GREEN, ""),
    Phase.OTHER: ("#FFFFFF", "++"),
}
SMALL = 0.045
"""Share of the axis below which a part has no number in it."""


def sheet(experiment: Experiment, found: Found) -> Sheet:
    """A row per entry and rate, all phases."""
    phases = (Phase.OUTSIDE, *EIGHT, Phase.ENCODER, Phase.WHOLE, Phase.OTHER)
    rows: list[tuple[Cell, ...]] = []
    for entry in experiment.entries:
        for rate, one in sorted(found.get(entry.name, {}).items()):
            taken = one.eight()
            cells = (taken.get(phase) for phase in phases)
            first = one.taken.get(Phase.FIRST_STEP)
            rows.append(
                (entry.name, entry.devices, rate, one.requests, one.encoded, *cells, first, one.ttft_ms, one.e2e_ms)
            )
    columns = (
        "deployment",
        "devices",
        experiment.rate_words,
        "requests traced",
        "of them through an encoder",
        *(f"{phase.value} (ms)" for phase in phases),
        "of decode: its first step (ms)",
        "TTFT of these (ms)",
        "E2E of these (ms)",
    )
    note = (
        "Means over whole answers of the window; a request that does not pass a phase spends nothing in it. A phase "
        "lasts from the latest stamp so far to its own: what hides behind something slower counts nothing. An instance "
        "that runs several stages stamps nothing between them, simulated stages stamp nothing, and plain servers are "
        "not traced. In EP, prefill includes encode."
    )
    return Sheet("phases", "Where the time of a request goes", columns, tuple(rows), note=note)


def draw(experiment: Experiment, found: Found, rate: float, path: Path) -> None:
    """At one rate."""
    bars = [(entry, found[entry.name][rate]) for entry in experiment.entries if rate in found.get(entry.name, {})]
    figure = new_figure(13.0, 2.9 + 0.52 * max(2, len(bars)))
    axes = figure.subplots(1, 2, squeeze=False, sharey=True)[0]
    names = [f"{entry.name}\n{entry.known_as.rpartition(', ')[2]}" for entry, _ in bars]
    first: list[dict[Phase, float]] = [dict(one.taken) for _, one in bars]
    for stack in first:
        stack.pop(Phase.DECODE, None)
    _bars(axes[0], names, first, "until the first token (mean, ms)", "Time to first token")
    _bars(axes[1], names, [one.eight() for _, one in bars], "until the last token (mean, ms)", "Whole request")
    legend(figure, axes, experiment)
    unit = " per device" if experiment.per_device else ""
    finish(figure, experiment, f"Phases of a request at {rate:g} req/s{unit}", path)


def _bars(ax: Axes, names: list[str], stacks: list[dict[Phase, float]], xlabel: str, title: str) -> None:
    tidy(ax, xlabel, title=title)
    if not stacks:
        nothing(ax, "no request of this rate was traced")
        return
    longest = max(sum(stack.values()) for stack in stacks)
    left = [0.0] * len(stacks)
    for phase in Phase:
        widths = [stack.get(phase, 0.0) for stack in stacks]
        if not any(widths):
            continue
        colour, hatch = LOOKS[phase]
        label = Phase.DECODE.value if phase is Phase.FIRST_STEP else phase.value
        ax.barh(
            range(len(stacks)),
            widths,
            left=left,
            height=0.66,
            color=colour,
            hatch=hatch,
            edgecolor="white" if not hatch else INK,
            linewidth=0.5,
            label=label,
        )
        for place, width in enumerate(widths):
            if width > SMALL * longest and not hatch:
                ink = "white" if colour in (BLUE, GREEN) else "black"
                at = left[place] + width / 2
                ax.text(at, place, f"{width:.0f}", ha="center", va="center", fontsize=8, color=ink)
        left = [begun + width for begun, width in zip(left, widths, strict=True)]
    for place, total in enumerate(left):
        ax.text(total + 0.01 * longest, place, f"{total:.0f}", va="center", fontsize=8, fontweight="bold", color=INK)
    ax.set_yticks(range(len(stacks)), names)
    ax.set_xlim(0, longest * 1.1)
    ax.set_ylim(len(stacks) - 0.45, -0.55)
    ax.grid(visible=False, axis="y")
