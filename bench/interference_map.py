"""The picture of an interference profile, after EPD-Serve's Fig. 6: needs of the operators, and heat maps. matplotlib.

Left, how near each operator alone comes to the best operations and bytes per second of any; right, one heat map per
division of the cores. Colours are cividis, and Okabe and Ito's, which colour-blind people tell apart; every field says
its number as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from bench.timeline import BLUE, ORANGE, check_plot
from npu_ops.interference_profile import InterferenceMap, InterferenceProfile

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

__all__ = ["check_plot", "draw"]

BAR = 0.38
MOST = 4.0  # where the colours end: one bad pair must not make all others look alike


def draw(
    path: Path, profile: InterferenceProfile, shares_of_best: Mapping[str, tuple[float, float]], heading: str
) -> None:
    """Write the PNG. `heading` names the device and says that it is real."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no display, and no state of pyplot's
    from matplotlib.figure import Figure

    maps = profile.maps
    count = len(profile.operators)
    figure = Figure(figsize=(4.6 + (1.9 + 0.62 * count) * len(maps), 2.6 + 0.5 * count), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots(1, 1 + len(maps), squeeze=False, width_ratios=[4.0, *[1.9 + 0.62 * count] * len(maps)])[0]
    _bars(axes[0], profile, shares_of_best)
    worst = max(one.slowdown for each in maps for one in each.slowdowns)
    top = min(MOST, max(2.0, worst))  # one scale: maps are to be compared
    for ax, one in zip(axes[1:], maps, strict=True):
        image = _heat(ax, one, top)
    bar = figure.colorbar(image, ax=axes[-1], shrink=0.8, extend="max" if worst > top else "neither")
    bar.set_label("latency together / alone (times)")
    figure.suptitle(heading, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.print_png(str(path))


def intensity(flops_per_byte: float) -> str:
    digits = 0 if flops_per_byte >= 10 or not flops_per_byte else 2
    return f"{flops_per_byte:.{digits}f} FLOP/B"


def title(found: InterferenceMap) -> str:
    if found.core_shares is None:
        return "both have all cores"
    return "{:g} of the cores, the neighbour {:g}".format(*found.core_shares)


def _bars(ax: Axes, profile: InterferenceProfile, best: Mapping[str, tuple[float, float]]) -> None:
    names = [one.name for one in profile.operators]
    places = range(len(names))
    colours = ((BLUE, "", "operations/s"), (ORANGE, "///", "bytes/s"))
    for which, (colour, hatch, words) in enumerate(colours):
        ax.barh(
            [place + (which - 0.5) * BAR for place in places],
            [100.0 * best[name][which] for name in names],
            height=BAR,
            color=colour,
            hatch=hatch,
            edgecolor="white",
            linewidth=0.0,
            label=words,
        )
    rows = [f"{one.name}\n{intensity(one.flops / one.moved_bytes)}, {one.needs}" for one in profile.operators]
    ax.set_yticks(list(places), rows, fontsize=7)
    ax.invert_yaxis()
    ax.set_xlabel("alone, of the best of all operators (%)", fontsize=8)
    ax.set_title("what each needs", fontsize=9, loc="left")
    ax.legend(loc="lower right", fontsize=7)


def _heat(ax: Axes, found: InterferenceMap, top: float) -> AxesImage:
    names = list(found.alone_s)
    values = [[found.of(own, beside).slowdown for beside in names] for own in names]
    image = ax.imshow(values, cmap="cividis", vmin=min(1.0, *map(min, values)), vmax=top, aspect="auto")
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            ink = "black" if value > (1.0 + top) / 2 else "white"  # cividis ends in yellow
            ax.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=7, color=ink)
    ax.set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize=7)
    ax.set_yticks(range(len(names)), names, fontsize=7)
    ax.set_xlabel("neighbour", fontsize=8)
    ax.set_ylabel("slowed down", fontsize=8)
    ax.set_title(title(found), fontsize=9, loc="left")
    return image
