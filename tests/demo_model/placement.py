"""Where the shapes of a randomised picture lie and how large they are: off the grid's centres, in a clear order.

Owns the rule that a listing "left to right, then top to bottom" can be told from the picture: shapes of one column
lie nearly above one another, those of two columns do not. Training and the foreign pictures of the evaluation share
it; neither the split of scenes nor pixels are known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from epd_serve.demo.pictures import GRID, Shape

_LARGEST = (0.42, 0.26, 0.17)  # half sizes of one, two, three shapes
_SMALLEST = 0.07
_OFF = 0.4  # of a cell: the farthest that a centre lies from its cell's
_APART, _ABOVE = 0.6, 0.25  # of a cell: centres of two columns, and of one, are so far from one another in x
_TRIES = 12


@dataclass(frozen=True)
class Place:
    """Centre and half size of a shape, in pixels of the picture."""

    x: float
    y: float
    half: float


def places(shapes: Sequence[Shape], size: tuple[int, int], chance: np.random.Generator) -> list[Place]:
    """One place per shape: inside the picture of `size` (width, height), in its cell, apart from the others."""
    largest = _LARGEST[max(0, len(shapes) - 1)]
    for attempt in range(_TRIES):
        off = _OFF * (1 - attempt / _TRIES)
        common = _SMALLEST * (largest / _SMALLEST) ** chance.uniform(0.25, 1 - 0.4 * attempt / _TRIES)
        found = [_place(shape, size, off, common * chance.uniform(0.8, 1.2), chance) for shape in shapes]
        if _clear(shapes, found, size):
            return found
    return [_place(shape, size, 0.0, 0.11, chance) for shape in shapes]


def _place(shape: Shape, size: tuple[int, int], off: float, half: float, chance: np.random.Generator) -> Place:
    """Moved towards the picture's middle where a large shape needs it, and made smaller where that is not enough."""
    half_px = half * min(size)
    centre = []
    for side, index in zip(size, (shape.column, shape.row), strict=True):
        cell = side / GRID
        middle = (index + 0.5) * cell
        half_px = min(half_px, (min(middle, side - middle) + off * cell) / 1.1)
        at = middle + chance.uniform(-off, off) * cell
        centre.append(float(np.clip(at, 1.1 * half_px, side - 1.1 * half_px)))
    return Place(centre[0], centre[1], half_px)


def _clear(shapes: Sequence[Shape], found: Sequence[Place], size: tuple[int, int]) -> bool:
    cell = size[0] / GRID
    for index, (shape, place) in enumerate(zip(shapes, found, strict=True)):
        for other, its in zip(shapes[:index], found[:index], strict=True):
            dx, dy = abs(place.x - its.x), abs(place.y - its.y)
            if max(dx, dy) < 1.15 * (place.half + its.half):
                return False
            if dx > _ABOVE * cell if shape.column == other.column else dx < _APART * cell:
                return False
    return True
