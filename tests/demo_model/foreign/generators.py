"""Which generators of foreign pictures there are, and the questions about their pictures.

A generator gets a sketch (`sketches`) and gives the bytes of a picture's file, made by its own library in its own
colours.
"""

from __future__ import annotations

import importlib
import io
import zlib
from dataclasses import dataclass

import numpy as np
from PIL import Image

from epd_serve.demo.pictures import describe
from tests.demo_model.dialogue import Turn
from tests.demo_model.examination import Question
from tests.demo_model.foreign.sketches import sketch
from tests.demo_model.scenes import Scene
from tests.demo_model.wordings import NUMBERS, wording

MOST_SHAPES = 3


@dataclass(frozen=True)
class Generator:
    """One source of pictures.

    Attributes:
        about: for the card.
        module: of this package, with `draw(sketch, chance) -> bytes`; "" for pictures kept in a file.
    """

    about: str
    module: str = ""


GENERATORS = {
    "visitor": Generator(
        "Pillow, smooth edges, on white, cream and near-black; one shape alone is large", "visitor_pen"
    ),
    "pil": Generator("Pillow's ImageDraw: no anti-aliasing, outlines, PNG, GIF and JPEG", "pillow_pen"),
    "opencv": Generator("OpenCV: blur, noise, gradients, coarse JPEG", "opencv_pen"),
    "matplotlib": Generator("matplotlib: patches, with and without axes, light and dark", "matplotlib_pen"),
    "photo": Generator("felt pen on paper, as a phone would photograph it", "camera"),
    "canvas": Generator("a canvas in Chromium: gradients, shadows, dark mode, WebP and JPEG"),
    "svg": Generator("SVG in Chromium: strokes, opacity, rounded and turned shapes, the same files"),
}


def task(generator: str, shapes: int) -> str:
    return f"{generator}, {NUMBERS[shapes - 1]}"


TASKS = tuple(task(name, shapes) for name in GENERATORS for shapes in range(1, MOST_SHAPES + 1))


def questions(number: int, seed: int, tasks: tuple[str, ...] = TASKS) -> list[Question]:
    """What is in each of `number` pictures per task; of kept pictures as many as there are, at most.

    Raises:
        ImportError: a generator's library is not installed.
    """
    made: list[Question] = []
    for name in GENERATORS:
        for shapes in range(1, MOST_SHAPES + 1):
            if task(name, shapes) in tasks:
                made += _questions(name, shapes, number, seed)
    return made


def _questions(name: str, shapes: int, number: int, seed: int) -> list[Question]:
    chances = [np.random.default_rng([seed, zlib.crc32(task(name, shapes).encode()), i]) for i in range(number)]
    if module := GENERATORS[name].module:
        draw = importlib.import_module(f"{__package__}.{module}").draw
        scenes = []
        for chance in chances:
            it = sketch(chance, shapes)
            file = draw(it, chance)
            scenes.append(Scene(it.shapes, it.background, Image.open(io.BytesIO(file)).size, file))
    else:
        from tests.demo_model.foreign import browser  # a command too: not imported before it is run

        scenes = browser.kept(name, shapes)[:number]
    return [
        Question(
            task(name, shapes), (Turn(wording(chance, "describe", unseen=True), describe(scene.shapes), (scene,)),)
        )
        for scene, chance in zip(scenes, chances, strict=False)
    ]
