"""Pictures by Pillow's ImageDraw, as a script of ten lines would draw them: CSS colours, hard edges."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image, ImageDraw, ImageOps

from tests.demo_model.foreign.sketches import Sketch, corners

_COLOURS = {
    "red": ("red", "crimson", "firebrick", "#e53935"),
    "green": ("green", "limegreen", "forestgreen", "lime", "seagreen"),
    "blue": ("blue", "royalblue", "dodgerblue", "mediumblue", "navy"),
    "yellow": ("yellow", "gold", "#fdd835"),
    "purple": ("purple", "darkviolet", "mediumorchid", "indigo", "#8e24aa"),
    "orange": ("orange", "darkorange", "#fb8c00"),
    "white": ("white", "white", "ivory", "whitesmoke", "aliceblue"),
    "grey": ("gray", "darkgray", "slategray"),
    "black": ("black", "#121212", "#1e1e1e", "midnightblue"),
}


def draw(sketch: Sketch, chance: np.random.Generator) -> bytes:
    """The bytes of a PNG, GIF or JPEG."""
    names = ("black", "#1e1e1e") if _has_blue(sketch) else _COLOURS["black"]
    behind = str(chance.choice(names if sketch.background == "black" else _COLOURS[sketch.background]))
    picture = Image.new("RGB", sketch.size, behind)
    if chance.random() < 0.2:
        ramp = Image.linear_gradient("L").resize(sketch.size)
        darker = ImageOps.colorize(Image.new("L", sketch.size, 0), "#808080", "white")
        picture = Image.composite(Image.blend(picture, darker, 0.3), picture, ramp)
    pen = ImageDraw.Draw(picture)
    outline = None if chance.random() < 0.6 else "white" if sketch.background == "black" else "black"
    width = 0 if outline is None else max(1, round(min(sketch.size) * chance.uniform(0.005, 0.02)))
    turned = chance.uniform(-0.25, 0.25) if chance.random() < 0.3 else 0.0
    for shape, place in zip(sketch.shapes, sketch.places, strict=True):
        fill = str(chance.choice(_COLOURS[shape.colour]))
        if shape.kind == "circle":
            box = (place.x - place.half, place.y - place.half, place.x + place.half, place.y + place.half)
            pen.ellipse(box, fill=fill, outline=outline, width=width)
        else:
            pen.polygon(corners(shape.kind, place, turned), fill=fill, outline=outline, width=max(1, width))
    data = io.BytesIO()
    kind = str(chance.choice(("PNG", "GIF", "JPEG"), p=(0.6, 0.1, 0.3)))
    picture.save(data, kind, **({"quality": int(chance.integers(40, 95))} if kind == "JPEG" else {}))
    return data.getvalue()


def _has_blue(sketch: Sketch) -> bool:
    """Blue or purple would not be seen on midnight blue."""
    return any(shape.colour in ("blue", "purple") for shape in sketch.shapes)
