"""Random scenes for training and evaluation, apart by construction: no scene is in both.

Owns what a scene is, how one is drawn by chance, and the split. Leaves to others: pixels (`raster`, `pictures.draw`).
The split looks at the shapes with their cells, not at background or size: an evaluated arrangement was never seen on
any background. The empty scene has no arrangement and is in both.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import numpy as np

from epd_serve.demo.pictures import BACKGROUNDS, COLOURS, GRID, KINDS, Shape

HELD_OUT_OF = 8  # one arrangement in so many is kept for evaluation
_MIDDLE = 0.35  # of the single shapes of training: there people draw them, and only there is room for a large one
_NAMES = [(colour, kind) for colour in COLOURS for kind in KINDS]
_CELLS = [(column, row) for column in range(GRID) for row in range(GRID)]
_SIZES = (64, 96, 128, 160, 200, 224, 256, 300, 320, 384, 512, 640, 768, 1024, 1600, 2160)
_ASPECTS = (4 / 3, 3 / 2, 16 / 9, 2.0)
# How often none, one, two, three shapes: training has more of what is harder.
_COUNTS = {True: (0.06, 0.34, 0.33, 0.27), False: (0.05, 0.28, 0.31, 0.36)}


@dataclass(frozen=True)
class Scene:
    """One picture as the model should see it.

    Attributes:
        shapes: in the order in which the model lists them: left to right, then top to bottom.
        background: a key of `BACKGROUNDS`.
        size: (width, height) in pixels, before the processor.
        file: the bytes of the picture where other code drew it (`foreign`); else `pictures.draw` is what draws it.
    """

    shapes: tuple[Shape, ...]
    background: str
    size: tuple[int, int]
    file: bytes | None = field(default=None, repr=False)


def held_out(shapes: tuple[Shape, ...]) -> bool:
    """Whether this arrangement is for evaluation only."""
    text = ";".join(f"{shape.colour} {shape.kind} {shape.row} {shape.column}" for shape in shapes)
    return bool(shapes) and zlib.crc32(text.encode()) % HELD_OUT_OF == 0


def random_size(chance: np.random.Generator) -> tuple[int, int]:
    """(width, height): half square, 64 pixels to 4K."""
    side = int(chance.choice(_SIZES))
    if chance.random() < 0.55:
        return side, side
    longer = round(side * float(chance.choice(_ASPECTS)))
    return (longer, side) if chance.random() < 0.6 else (side, longer)


def random_scene(
    chance: np.random.Generator, *, evaluation: bool = False, size: tuple[int, int] | None = None, count: int = -1
) -> Scene:
    """A scene of one side of the split.

    Args:
        chance: what decides; the same state gives the same scene.
        evaluation: which side.
        size: (width, height); by chance when None.
        count: number of shapes, by chance when negative.
    """
    size = size or random_size(chance)
    number = count if count >= 0 else int(chance.choice(4, p=_COUNTS[evaluation]))
    while True:
        cells = sorted(chance.choice(len(_CELLS), number, replace=False))
        if number == 1 and not evaluation and chance.random() < _MIDDLE:
            cells = [_CELLS.index((GRID // 2, GRID // 2))]
        names = chance.choice(len(_NAMES), number, replace=False)
        shapes = tuple(Shape(*_NAMES[name], *reversed(_CELLS[cell])) for name, cell in zip(names, cells, strict=True))
        if not shapes or held_out(shapes) == evaluation:
            break
    free = [name for name in BACKGROUNDS if all(shape.colour != name for shape in shapes)]
    background = "white" if chance.random() < 0.35 else free[int(chance.integers(len(free)))]
    return Scene(shapes, background, size)
