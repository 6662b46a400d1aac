"""Sample pictures that ship with the package: what the first `curl` of a newcomer shows to the demo model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from epd_serve.demo import pictures
from epd_serve.demo.pictures import Shape


@dataclass(frozen=True)
class Sample:
    """How a shipped picture was drawn."""

    shapes: tuple[Shape, ...]
    size: int | tuple[int, int] = 224
    background: str = "white"

    def draw(self) -> Image.Image:
        return pictures.draw(self.shapes, self.size, self.background)


SAMPLES = {
    "red_circle": Sample((Shape("red", "circle"),), 128),
    "square_and_triangle": Sample((Shape("blue", "square", 1, 0), Shape("green", "triangle", 1, 2)), 256),
    "night": Sample((Shape("yellow", "circle", 0, 2), Shape("purple", "triangle", 2, 0)), (320, 240), "black"),
}


def sample_path(name: str) -> Path:
    """Path of the PNG named `name`, a key of `SAMPLES`."""
    return Path(__file__).parent / "samples" / f"{name}.png"


def write_samples() -> None:
    """Draw the PNG files anew (`python -m epd_serve.demo.sample_pictures`)."""
    for name, sample in SAMPLES.items():
        sample.draw().save(sample_path(name), optimize=True)


if __name__ == "__main__":
    write_samples()
