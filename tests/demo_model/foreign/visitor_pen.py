"""Pictures that a visitor would try first: Pillow, drawn four times as large and scaled down, in colours of today's
palettes on white, cream or near-black, 180 to 1,400 pixels. A shape that is alone is mostly large.
"""

from __future__ import annotations

import io

import numpy as np
from PIL import Image, ImageDraw

from tests.demo_model.foreign.sketches import Sketch, corners
from tests.demo_model.placement import Place

_COLOURS = {
    "red": ("#dc2626", "#ef4444", "#b91c1c", "#ff0000"),
    "green": ("#16a34a", "#22c55e", "#15803d", "#00aa00"),
    "blue": ("#2563eb", "#3b82f6", "#1d4ed8", "#0000ff"),
    "yellow": ("#facc15", "#fde047", "#ffdd00", "#ffff00"),
    "purple": ("#9333ea", "#7e22ce", "#800080", "#a855f7"),
    "orange": ("#f97316", "#fb923c", "#ff8800", "#ffa500"),
}
_GROUNDS = ("#ffffff", "#ffffff", "#fffdd0", "#faf3e0", "#f5f0e1", "#0b0b0f", "#111827", "#1a1a1a")
_SMALLEST, _LARGEST = 180, 1400  # pixels of the longer side
_DRAWN = 4  # times as large


def draw(sketch: Sketch, chance: np.random.Generator) -> bytes:
    """The bytes of a PNG or JPEG."""
    scale = np.exp(chance.uniform(np.log(_SMALLEST), np.log(_LARGEST))) / max(sketch.size)
    width, height = (round(side * scale) for side in sketch.size)
    picture = Image.new("RGB", (width * _DRAWN, height * _DRAWN), str(chance.choice(_GROUNDS)))
    pen = ImageDraw.Draw(picture)
    times = scale * _DRAWN
    turned = chance.uniform(-0.2, 0.2) if chance.random() < 0.2 else 0.0
    places = [Place(it.x * times, it.y * times, it.half * times) for it in sketch.places]
    if len(places) == 1 and chance.random() < 0.7:
        half = min(picture.size) * chance.uniform(0.3, 0.46)
        off = chance.uniform(-0.8, 0.8, 2) * (min(picture.size) / 2 - half)
        places = [Place(picture.width / 2 + off[0], picture.height / 2 + off[1], half)]
    for shape, place in zip(sketch.shapes, places, strict=True):
        fill = str(chance.choice(_COLOURS[shape.colour]))
        if shape.kind == "circle":
            pen.ellipse((place.x - place.half, place.y - place.half, place.x + place.half, place.y + place.half), fill)
        else:
            pen.polygon(corners(shape.kind, place, turned), fill)
    picture = picture.resize((width, height), Image.Resampling.LANCZOS)
    data = io.BytesIO()
    if chance.random() < 0.6:
        picture.save(data, "PNG")
    else:
        picture.save(data, "JPEG", quality=int(chance.integers(50, 96)))
    return data.getvalue()
