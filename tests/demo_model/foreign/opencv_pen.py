"""Pictures by OpenCV, as a script for a vision model's first test would draw them: pure colours, noise, JPEG."""

from __future__ import annotations

import cv2
import numpy as np

from tests.demo_model.foreign.sketches import Sketch, corners

_COLOURS = {  # blue, green, red
    "red": ((0, 0, 255), (60, 20, 220), (50, 50, 200)),
    "green": ((0, 255, 0), (0, 128, 0), (80, 175, 76)),
    "blue": ((255, 0, 0), (200, 80, 30), (243, 150, 33)),
    "yellow": ((0, 255, 255), (40, 220, 250)),
    "purple": ((128, 0, 128), (211, 0, 148), (182, 89, 155)),
    "orange": ((0, 165, 255), (0, 140, 255), (20, 120, 240)),
    "white": ((255, 255, 255), (240, 240, 240), (225, 240, 250)),
    "grey": ((128, 128, 128), (150, 150, 150), (105, 100, 100)),
    "black": ((0, 0, 0), (30, 30, 30), (50, 40, 30)),
}
_SHIFT = 4  # fractional bits of coordinates


def draw(sketch: Sketch, chance: np.random.Generator) -> bytes:
    """The bytes of a JPEG or PNG."""
    width, height = sketch.size
    pixels = np.empty((height, width, 3), np.uint8)
    pixels[:] = _colour(sketch.background, chance)
    if chance.random() < 0.25:
        fall = np.linspace(1.0, chance.uniform(0.7, 0.95), width if chance.random() < 0.5 else height)
        ramp = fall[None, :, None] if len(fall) == width else fall[:, None, None]
        pixels = (pixels * ramp).astype(np.uint8)
    line = int(chance.choice((cv2.LINE_8, cv2.LINE_AA)))
    rim = None if chance.random() < 0.65 else (0, 0, 0) if sketch.background != "black" else (255, 255, 255)
    thick = max(1, round(min(sketch.size) * chance.uniform(0.005, 0.015)))
    turn = chance.uniform(-0.2, 0.2) if chance.random() < 0.3 else 0.0
    for shape, place in zip(sketch.shapes, sketch.places, strict=True):
        colour = _colour(shape.colour, chance)
        if shape.kind == "circle":
            centre, radius = (_fixed(place.x), _fixed(place.y)), _fixed(place.half)
            cv2.circle(pixels, centre, radius, colour, cv2.FILLED, line, _SHIFT)
            if rim:
                cv2.circle(pixels, centre, radius, rim, thick, line, _SHIFT)
        else:
            points = [np.array([[_fixed(x), _fixed(y)] for x, y in corners(shape.kind, place, turn)], np.int32)]
            cv2.fillPoly(pixels, points, colour, line, _SHIFT)
            if rim:
                cv2.polylines(pixels, points, True, rim, thick, line, _SHIFT)
    if chance.random() < 0.3:
        pixels = cv2.GaussianBlur(pixels, (0, 0), chance.uniform(0.004, 0.012) * min(sketch.size)).astype(np.uint8)
    if chance.random() < 0.4:
        noise = chance.normal(0, chance.uniform(3, 20), pixels.shape)
        pixels = np.clip(pixels + noise, 0, 255).astype(np.uint8)
    kind, flags = (".jpg", [cv2.IMWRITE_JPEG_QUALITY, int(chance.integers(20, 90))])
    if chance.random() < 0.3:
        kind, flags = ".png", []
    done, data = cv2.imencode(kind, pixels, flags)
    assert done
    return data.tobytes()


def _colour(name: str, chance: np.random.Generator) -> tuple[int, int, int]:
    shades = _COLOURS[name]
    return shades[int(chance.integers(len(shades)))]


def _fixed(number: float) -> int:
    return round(number * (1 << _SHIFT))
