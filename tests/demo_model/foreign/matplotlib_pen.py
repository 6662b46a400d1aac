"""Pictures by matplotlib's patches, in its own colours, with and without axes."""

from __future__ import annotations

import io

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Circle, Polygon

from tests.demo_model.foreign.sketches import Sketch, corners

_COLOURS = {
    "red": ("tab:red", "r", "xkcd:red", "C3"),
    "green": ("tab:green", "g", "xkcd:green", "C2"),
    "blue": ("tab:blue", "b", "xkcd:blue", "C0"),
    "yellow": ("yellow", "xkcd:yellow", "gold"),
    "purple": ("tab:purple", "purple", "xkcd:purple", "C4"),
    "orange": ("tab:orange", "orange", "xkcd:orange", "C1"),
    "white": ("white", "white", "#eaeaf2", "w"),
    "grey": ("grey", "0.55", "0.65"),
    "black": ("black", "0.1", "#212121"),
}
_DPI = 100


def draw(sketch: Sketch, chance: np.random.Generator) -> bytes:
    """The bytes of a PNG."""
    width, height = sketch.size
    behind = str(chance.choice(_COLOURS[sketch.background]))
    figure = Figure(figsize=(width / _DPI, height / _DPI), dpi=_DPI, facecolor=behind)
    canvas = FigureCanvasAgg(figure)
    with_axes = min(sketch.size) >= 200 and chance.random() < 0.3
    axes = figure.add_axes((0.12, 0.1, 0.84, 0.86) if with_axes else (0, 0, 1, 1), facecolor=behind)
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    if with_axes:
        ink = "white" if sketch.background == "black" else "black"
        axes.tick_params(colors=ink, labelsize=7)
        for spine in axes.spines.values():
            spine.set_color(ink)
        if chance.random() < 0.3:
            axes.grid(alpha=0.4)
    else:
        axes.axis("off")
    edge = None if chance.random() < 0.6 else "black" if sketch.background != "black" else "white"
    line = chance.uniform(0.5, 3)
    turn = chance.uniform(-0.25, 0.25) if chance.random() < 0.3 else 0.0
    for shape, place in zip(sketch.shapes, sketch.places, strict=True):
        colour = str(chance.choice(_COLOURS[shape.colour]))
        looks = {"facecolor": colour, "edgecolor": edge or colour, "linewidth": line, "zorder": 3}
        if shape.kind == "circle":
            axes.add_patch(Circle((place.x, place.y), place.half, **looks))
        else:
            axes.add_patch(Polygon(corners(shape.kind, place, turn), closed=True, **looks))
    data = io.BytesIO()
    canvas.print_png(data)
    return data.getvalue()
