"""The chart of an interference profile, after EPD-Serve's Fig. 6: needs of the operators, and heat maps. matplotlib.

Left, how near each operator alone comes to the best operations and bytes per second of any; right, one heat map per
division of the cores. Colours are cividis, and Okabe and Ito's, which colour-blind people tell apart; every field says
its number as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from bench.micro.charts import BLUE, ORANGE, chart
from bench.micro.interference.windows import label
from npu_ops.interference_profile import InterferenceMap, InterferenceProfile

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

BAR = 0.38
MOST = 4.0  # where the colours end: one bad pair must not make all others look alike


def draw(path: Path, profile: InterferenceProfile, best: Mapping[str, tuple[float, float]], heading: str) -> None:
    """Write the PNG. `best`: of each operator; `heading` names the device and says that it is real."""
    maps, count = profile.maps, len(profile.operators)
    map_in = 1.9 + 0.62 * count
    with chart(path, 4.6 + map_in * len(maps), 2.6 + 0.5 * count, heading) as figure:
        widths = [4.0, *[map_in] * len(maps)]
        left, *right = figure.subplots(1, 1 + len(maps), squeeze=False, width_ratios=widths)[0]
        _bars(left, profile, best)
        worst = max(one.slowdown for each in maps for one in each.slowdowns)
        top = min(MOST, max(2.0, worst))  # one scale: maps are to be compared
        images = [_heat(ax, one, top) for ax, one in zip(right, maps, strict=True)]
        bar = figure.colorbar(images[-1], ax=right[-1], shrink=0.8, extend="max" if worst > top else "neither")
        bar.set_label("latency together / alone (times)")


def intensity(flops_per_byte: float) -> str:
    return f"{flops_per_byte:.{0 if flops_per_byte >= 10 or not flops_per_byte else 2}f}"


def _bars(ax: Axes, profile: InterferenceProfile, best: Mapping[str, tuple[float, float]]) -> None:
    places = range(len(profile.operators))
    for which, (colour, hatch, what) in enumerate(((BLUE, "", "operations/s"), (ORANGE, "///", "bytes/s"))):
        ax.barh(
            [place + (which - 0.5) * BAR for place in places],
            [100.0 * best[one.name][which] for one in profile.operators],
            height=BAR,
            color=colour,
            hatch=hatch,
            edgecolor="white",
            linewidth=0.0,
            label=what,
        )
    rows = [f"{one.name}\n{intensity(one.flops / one.moved_bytes)} FLOP/B, {one.needs}" for one in profile.operators]
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
    ax.set_title(label(found.core_shares), fontsize=9, loc="left")
    return image
