"""Draws the pictures that the demo model was trained to talk about: 0 to 3 plain shapes on a plain background.

A picture is a 3x3 grid; each shape fills one cell. The demo model lists shapes left to right, top to bottom. Drawing
is deterministic: the same arguments give the same pixels, so a picture can be written down as text in a test.
`SAMPLES` ship with the package: what the first `curl` of a newcomer shows to the demo model.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw

from epd_serve.errors import ConfigError

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 80, 220),
    "yellow": (240, 210, 40),
    "purple": (140, 50, 170),
    "orange": (245, 140, 30),
}
KINDS = ("circle", "square", "triangle")
BACKGROUNDS: dict[str, tuple[int, int, int]] = {
    "white": (255, 255, 255),
    "grey": (128, 128, 128),
    "black": (0, 0, 0),
    **COLOURS,
}
GRID = 3
FILL = 0.8  # of the cell's shorter side
_SMOOTH = 4  # drawn this much larger and scaled down: edges come out smooth


@dataclass(frozen=True)
class Shape:
    """One shape in one cell of the grid.

    Attributes:
        colour: a key of `COLOURS`.
        kind: one of `KINDS`.
        row, column: cell, 0 to 2, from the top left.
    """

    colour: str
    kind: str
    row: int = 1
    column: int = 1

    def __post_init__(self) -> None:
        if self.colour not in COLOURS:
            raise ConfigError(f"unknown colour {self.colour!r}: one of {', '.join(COLOURS)}", param="colour")
        if self.kind not in KINDS:
            raise ConfigError(f"unknown shape {self.kind!r}: one of {', '.join(KINDS)}", param="kind")
        if not (0 <= self.row < GRID and 0 <= self.column < GRID):
            raise ConfigError(f"cell ({self.row}, {self.column}) is outside the 3x3 grid", param="row")

    def __str__(self) -> str:
        return f"{self.colour} {self.kind}"


def draw(shapes: Sequence[Shape], size: int | tuple[int, int] = 224, background: str = "white") -> Image.Image:
    """Draw `shapes` on a plain background.

    Args:
        shapes: in any order, each in its own cell.
        size: pixels; one number for a square picture, else (width, height).
        background: a key of `BACKGROUNDS`.

    Returns:
        An RGB picture of that size.
    """
    if background not in BACKGROUNDS:
        raise ConfigError(f"unknown background {background!r}: one of {', '.join(BACKGROUNDS)}", param="background")
    width, height = (size, size) if isinstance(size, int) else size
    # Large pictures have no visible steps along their edges: drawing them larger would only cost time.
    scale = _SMOOTH if max(width, height) <= 512 else 1
    picture = Image.new("RGB", (width * scale, height * scale), BACKGROUNDS[background])
    pen = ImageDraw.Draw(picture)
    cell_width, cell_height = picture.width / GRID, picture.height / GRID
    half = min(cell_width, cell_height) * FILL / 2
    for shape in shapes:
        x, y = (shape.column + 0.5) * cell_width, (shape.row + 0.5) * cell_height
        box = (x - half, y - half, x + half, y + half)
        colour = COLOURS[shape.colour]
        if shape.kind == "circle":
            pen.ellipse(box, fill=colour)
        elif shape.kind == "square":
            pen.rectangle(box, fill=colour)
        else:
            pen.polygon([(x, y - half), (x - half, y + half), (x + half, y + half)], fill=colour)
    return picture if scale == 1 else picture.resize((width, height), Image.Resampling.LANCZOS)


def scene(seed: int, count: int | None = None) -> tuple[Shape, ...]:
    """A random scene that a seed fixes: `count` different shapes (1 to 3 when None) in cells of their own.

    They come in the order in which the demo model lists them: left to right, then top to bottom.
    """
    chance = random.Random(seed)
    number = count if count is not None else chance.randint(1, 3)
    cells = sorted(chance.sample([(column, row) for column in range(GRID) for row in range(GRID)], number))
    names = chance.sample([(colour, kind) for colour in COLOURS for kind in KINDS], number)
    return tuple(Shape(colour, kind, row, column) for (colour, kind), (column, row) in zip(names, cells, strict=True))


def describe(shapes: Sequence[Shape]) -> str:
    """The demo model's answer to "What is in the picture?" when it is right, e.g. `a red circle and a blue square`."""
    words = [f"{'an' if shape.colour == 'orange' else 'a'} {shape}" for shape in _in_listing_order(shapes)]
    return " and ".join(part for part in (", ".join(words[:-1]), words[-1]) if part) if words else "nothing"


def _in_listing_order(shapes: Sequence[Shape]) -> list[Shape]:
    return sorted(shapes, key=lambda shape: (shape.column, shape.row))


@dataclass(frozen=True)
class Sample:
    """How a shipped picture was drawn."""

    shapes: tuple[Shape, ...]
    size: int | tuple[int, int] = 224
    background: str = "white"

    def draw(self) -> Image.Image:
        return draw(self.shapes, self.size, self.background)


SAMPLES = {
    "red_circle": Sample((Shape("red", "circle"),), 128),
    "square_and_triangle": Sample((Shape("blue", "square", 1, 0), Shape("green", "triangle", 1, 2)), 256),
    "night": Sample((Shape("yellow", "circle", 0, 2), Shape("purple", "triangle", 2, 0)), (320, 240), "black"),
}


def sample_path(name: str) -> Path:
    """Path of the PNG named `name`, a key of `SAMPLES`."""
    return Path(__file__).parent / "samples" / f"{name}.png"


def write_samples() -> None:
    """Draw the PNG files anew (`python -m epd_serve.demo.pictures`)."""
    for name, sample in SAMPLES.items():
        sample.draw().save(sample_path(name), optimize=True)


if __name__ == "__main__":
    write_samples()
