"""How charts look: a colour, a marker and a line of its own for each entry, the footer that says what is shown.

Colours are Okabe and Ito's, which colour-blind people tell apart. Matplotlib is imported where something is drawn.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from bench.report.about import commit, machine
from bench.report.experiment import Entry, Experiment
from epd_serve.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLACK, ORANGE, SKY, GREEN, BLUE, VERMILLION, PURPLE, YELLOW = (
    "#000000",
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#0072B2",
    "#D55E00",
    "#CC79A7",
    "#B8A800",  # Okabe and Ito's yellow, darker: on white it could not be seen
)
COLOURS = (BLACK, BLUE, ORANGE, GREEN, VERMILLION, SKY, PURPLE, YELLOW)
MARKERS = ("s", "o", "^", "D", "v", "P", "X", "*", "<", ">")
LINES = ("--", "-", "-.", "-", ":", "-", (0, (3, 1, 1, 1, 1, 1)))
INK, FAINT = "#333333", "#767676"
DPI = 130
LOG_SPAN = 20.0
"""Largest over smallest value from which an axis is logarithmic."""
FOOTER_LINES, FOOTER_IN, LINE_IN = 2, 0.42, 0.215
LETTER_IN, HANDLE_IN, WIDEST = 0.068, 0.72, 6
"""Inches of the footer, of a line of a legend, of its letters and handles; columns of a legend, at most."""
MISSING = "pictures need matplotlib: pip install 'epd-serve[bench]'"


@dataclass(frozen=True)
class Style:
    colour: str
    marker: str
    line: Any


def styles(entries: Sequence[Entry]) -> dict[str, Style]:
    """By entry's name. The numbers of colours, markers and lines have no common divisor that matters, so that pairs
    repeat late."""
    return {
        entry.name: Style(COLOURS[n % len(COLOURS)], MARKERS[n % len(MARKERS)], LINES[n % len(LINES)])
        for n, entry in enumerate(entries)
    }


def line(experiment: Experiment, entry: Entry) -> dict[str, Any]:
    """Keywords of `Axes.plot`."""
    own = styles(experiment.entries)[entry.name]
    look = {"color": own.colour, "marker": own.marker, "linestyle": own.line}
    return {**look, "linewidth": 1.7, "markersize": 6.0}


_Of = TypeVar("_Of", bound=tuple[Any, ...])


def by_entry(experiment: Experiment, found: Sequence[_Of]) -> Iterator[tuple[Entry, list[_Of]]]:
    """Tuples that begin with their entry, by it, in the order of the experiment."""
    for entry in experiment.entries:
        if own := [one for one in found if one[0] is entry]:
            yield entry, own


def can_draw() -> bool:
    try:
        import matplotlib  # noqa: F401  (imported late: tables do not need it)
    except ImportError:
        return False
    return True


def new_figure(width: float, height: float) -> Figure:
    """Inches. Without a display, and without pyplot's state."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    return Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08), dpi=DPI)


def finish(figure: Figure, experiment: Experiment, title: str, path: Path) -> None:
    """Title, and the line that says of which kind and of what the figures are; then the file.

    Raises:
        ConfigError: it cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    width, height = figure.get_size_inches()
    figure.suptitle("\n".join(textwrap.wrap(title, int(width * 10.5))), fontsize=12, fontweight="bold", color=INK)
    words = textwrap.wrap(footer(experiment), int(width * 16))[:FOOTER_LINES]
    figure.text(0.5, 0.06 / height, "\n".join(words), ha="center", va="bottom", fontsize=8, color=FAINT)
    try:
        FigureCanvasAgg(figure).print_png(str(path))
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}", param="DIR") from error


def footer(experiment: Experiment) -> str:
    """Kind, workload, machine and commit."""
    env: dict[str, Any] = next((dict(entry.env) for entry in experiment.entries if entry.env), {})
    words = [experiment.kind, f"workload {experiment.workload}", machine(env.get("machine", {}))]
    words.append(f"commit {commit(env)}" if commit(env) else "")
    return " · ".join(filter(None, words))


def legend(figure: Figure, axes: Sequence[Axes], experiment: Experiment) -> None:
    """One legend below all panels, each thing once, entries in their order; in as many columns as there is room for."""
    seen: dict[str, Any] = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            seen.setdefault(label, handle)
    names = [entry.known_as for entry in experiment.entries if entry.known_as in seen]
    seen = {label: seen[label] for label in dict.fromkeys([*names, *seen])}
    width, height = figure.get_size_inches()
    columns = _columns([len(label) for label in seen], width)
    taken = (FOOTER_IN + LINE_IN * -(-len(seen) // columns)) / height
    engine: Any = figure.get_layout_engine()
    engine.set(rect=(0, taken, 1, 1 - taken))
    if seen:
        made = figure.legend(
            seen.values(),
            seen.keys(),
            loc="lower center",
            bbox_to_anchor=(0.5, (FOOTER_IN - 0.1) / height),
            ncols=columns,
            fontsize=9,
            frameon=False,
            handlelength=3.2,
            borderaxespad=0.0,
            borderpad=0.0,
        )
        made.set_in_layout(False)


def _columns(lengths: Sequence[int], width: float) -> int:
    """The most that fit; a legend is filled column by column, the first ones with one more."""
    for count in range(min(WIDEST, len(lengths)), 1, -1):
        least, more = divmod(len(lengths), count)
        sizes = [least + 1] * more + [least] * (count - more)
        left = iter(lengths)
        longest = [max(itertools.islice(left, size)) for size in sizes]
        if sum(LETTER_IN * letters + HANDLE_IN for letters in longest) < width:
            return count
    return 1


def tidy(ax: Axes, xlabel: str = "", ylabel: str = "", title: str = "") -> None:
    ax.set_xlabel(xlabel, fontsize=9)
    ax.set_ylabel(ylabel, fontsize=9)
    ax.set_title(title, fontsize=10, loc="left", color=INK)
    ax.tick_params(labelsize=8)
    ax.grid(True, which="major", color="#DDDDDD", linewidth=0.7)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def scale(ax: Axes, values: Sequence[float], *, log: bool = True) -> None:
    """From 0; logarithmic where values span much and `log` allows it."""
    if log and spans(values):
        logarithmic(ax)
    elif any(value > 0 for value in values):
        ax.set_ylim(0, max(values) * 1.08)


def spans(values: Sequence[float]) -> bool:
    """Too much for an axis that is not logarithmic."""
    return bool(values) and min(values) > 0 and max(values) > LOG_SPAN * min(values)


def logarithmic(ax: Axes) -> None:
    """With plain numbers at 1, 2 and 5."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    ax.yaxis.set_minor_locator(NullLocator())


def nothing(ax: Axes, words: str) -> None:
    """A panel without data says so."""
    ax.text(0.5, 0.5, words, transform=ax.transAxes, ha="center", va="center", fontsize=9, color=FAINT, wrap=True)
