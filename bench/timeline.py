"""The timeline picture: P's compute and the packets of one transfer as bars, one panel per mode. Needs matplotlib.

Colours are Okabe and Ito's, which colour-blind people tell apart; what is exposed is hatched as well.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.transfer_pd_stamps import Transfer
from epd_serve.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, SKY, ORANGE, VERMILLION = "#0072B2", "#56B4E9", "#E69F00", "#D55E00"
COMPUTE_AT, LINK_AT, BAR = 1.0, 0.0, 0.72  # where the two rows of bars lie, and how high a bar is


@dataclass(frozen=True)
class Bar:
    """From `start_ms`, for `length_ms`; `text` stands in it where there is room."""

    start_ms: float
    length_ms: float
    text: str = ""


@dataclass(frozen=True)
class Bars:
    """One transfer, in milliseconds since P began the step that computes the prompt.

    Attributes:
        layers: until the KV of each layer was written; rest: from the last layer's KV to the end of each step.
    """

    layers: tuple[Bar, ...]
    rest: tuple[Bar, ...]
    packets: tuple[Bar, ...]
    prefill_end_ms: float
    done_ms: float


def bars(transfer: Transfer) -> Bars:
    """What is drawn of a transfer. Of an unstamped step nothing is known but that it ended."""
    origin = min([transfer.first_packet, *(step.begun for step in transfer.steps)])

    def bar(begun: float, ended: float, text: str = "") -> Bar:
        return Bar((begun - origin) * 1e3, (ended - begun) * 1e3, text)

    layers = [
        bar(begun, ended, str(number))
        for step in transfer.steps
        for number, (begun, ended) in enumerate(zip((step.begun, *step.layers), step.layers, strict=False), start=1)
    ]
    rest = [bar(step.layers[-1] if step.layers else step.begun, step.ended) for step in transfer.steps]
    packets = [
        bar(one.begun, one.ended, f"{one.first + 1}–{one.last}" if one.last - one.first > 1 else f"{one.last}")
        for one in transfer.packets
    ]
    return Bars(
        tuple(layers),
        tuple(rest),
        tuple(packets),
        (transfer.prefill_end - origin) * 1e3,
        (transfer.done - origin) * 1e3,
    )


def typical(transfers: Sequence[Transfer]) -> Transfer:
    """The transfer whose exposed time is nearest to the median of all."""
    median = statistics.median(one.exposed_s for one in transfers)
    return min(transfers, key=lambda one: abs(one.exposed_s - median))


def check_plot(path: Path) -> None:
    """Raises ConfigError where no picture can be drawn: asked before measuring, which takes minutes."""
    if path.suffix != ".png":
        raise ConfigError(f"--plot {path}: name a file that ends in .png", param="--plot")
    try:
        import matplotlib  # noqa: F401  (imported late: measuring does not need it)
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'epd-serve[bench]'", param="--plot") from None


def draw(path: Path, panels: Sequence[tuple[str, Transfer]], heading: str) -> None:
    """One panel per (mode, transfer), all on one time axis. `heading` says what was measured, and real or emulated."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no display, and no state of pyplot's
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 1.3 + 1.25 * len(panels)), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for ax, (mode, transfer) in zip(axes, panels, strict=True):
        _panel(ax, mode, transfer)
    axes[0].legend(ncols=6, loc="lower center", bbox_to_anchor=(0.5, 1.22), frameon=False, fontsize=8)
    axes[-1].set_xlabel("time since P began to compute the prompt (ms)")
    figure.suptitle(heading, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.print_png(str(path))


def _panel(ax: Axes, mode: str, transfer: Transfer) -> None:
    shown = bars(transfer)
    _row(ax, shown.layers, COMPUTE_AT, BLUE, edge="white", ink="white", label="a layer of P, until its KV is written")
    _row(ax, shown.rest, COMPUTE_AT, SKY, edge="white", label="rest of the step")
    # With an edge of its own colour a packet is seen however short it is.
    _row(ax, shown.packets, LINK_AT, ORANGE, edge=ORANGE, label="a packet on the link")
    exposed_ms = max(0.0, shown.done_ms - shown.prefill_end_ms)
    ax.barh(
        (COMPUTE_AT + LINK_AT) / 2,
        exposed_ms,
        left=shown.prefill_end_ms,
        height=1 + BAR,
        facecolor="none",
        edgecolor=VERMILLION,
        hatch="///",
        linewidth=0.0,
        label="exposed",
    )
    ax.axvline(shown.prefill_end_ms, color="black", linestyle="--", linewidth=1.0, label="end of prefill")
    ax.axvline(shown.done_ms, color=VERMILLION, linewidth=1.2, label="DONE at D")
    ax.set_yticks([COMPUTE_AT, LINK_AT], ["P computes", "link"])
    ax.set_ylim(LINK_AT - 0.5, COMPUTE_AT + 0.5)
    count = len(shown.packets)
    packets = "packet" if count == 1 else "packets"
    ax.set_title(
        f"{mode}: {count} {packets}, exposed {exposed_ms:.1f} ms, overlap {transfer.overlap:.0%}",
        fontsize=9,
        loc="left",
    )


def _row(ax: Axes, row: Sequence[Bar], at: float, color: str, *, edge: str, label: str, ink: str = "black") -> None:
    spans = [(bar.start_ms, bar.length_ms) for bar in row]
    ax.broken_barh(spans, (at - BAR / 2, BAR), facecolors=color, edgecolors=edge, linewidth=0.8, label=label)
    widest = max((bar.start_ms + bar.length_ms for bar in row), default=0.0)
    for bar in row:
        if bar.text and bar.length_ms > 0.012 * len(bar.text) * widest:
            ax.text(bar.start_ms + bar.length_ms / 2, at, bar.text, color=ink, fontsize=7, ha="center", va="center")
