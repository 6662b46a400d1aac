"""What the foreign pictures show: which shapes, where, how large, before whose pen.

Owns the chance in it. Sizes and places are continuous, so no picture of training comes again. Leaves to others: pixels
and colours (each generator has its own), when an order of listing is clear (`placement`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from epd_serve.demo.pictures import COLOURS, GRID, KINDS, Shape
from tests.demo_model.placement import Place, places

_NAMES = [(colour, kind) for colour in COLOURS for kind in KINDS]
_SMALL = (96, 128, 150, 200, 240)
_SIZES = (*_SMALL, 256, 300, 320, 400, 480, 640, 800, 1080)
_ASPECTS = (1.0, 1.0, 1.25, 4 / 3, 1.5, 16 / 9)


@dataclass(frozen=True)
class Sketch:
    """A picture before it is drawn.

    Attributes:
        shapes: in the order of listing.
        places: one per shape, in pixels.
        size: (width, height).
        background: white, grey or black, of any shade; or a colour that no shape has.
    """

    shapes: tuple[Shape, ...]
    places: tuple[Place, ...]
    size: tuple[int, int]
    background: str


def sketch(chance: np.random.Generator, number: int, *, small: bool = False) -> Sketch:
    """A sketch of `number` shapes, 1 to 3; `small`: no more than 240 pixels on the shorter side."""
    side = int(chance.choice(_SMALL if small else _SIZES))
    longer = round(side * float(chance.choice(_ASPECTS)))
    size = (longer, side) if chance.random() < 0.6 else (side, longer)
    cells = sorted(chance.choice(GRID * GRID, number, replace=False).tolist())
    if number == 1 and chance.random() < 0.4:
        cells = [GRID * GRID // 2]
    drawn = [_NAMES[index] for index in chance.choice(len(_NAMES), number, replace=False)]
    shapes = tuple(
        Shape(colour, kind, cell % GRID, cell // GRID) for (colour, kind), cell in zip(drawn, cells, strict=True)
    )
    free = [colour for colour in COLOURS if all(shape.colour != colour for shape in shapes)]
    draw = chance.random()
    background = (
        "white" if draw < 0.5 else "black" if draw < 0.72 else "grey" if draw < 0.82 else str(chance.choice(free))
    )
    return Sketch(shapes, tuple(places(shapes, size, chance)), size, background)


def corners(kind: str, place: Place, turn: float = 0.0) -> list[tuple[float, float]]:
    """Of a square or an equilateral triangle around its place, turned by radians."""
    unit = [(-1, -1), (1, -1), (1, 1), (-1, 1)] if kind == "square" else [(0, -1.0), (1, 0.73), (-1, 0.73)]
    reach = 0.92 if kind == "square" else 1.0
    cos, sin = reach * place.half * np.cos(turn), reach * place.half * np.sin(turn)
    return [(float(place.x + x * cos - y * sin), float(place.y + x * sin + y * cos)) for x, y in unit]
