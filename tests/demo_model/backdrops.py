"""Backgrounds and cameras of randomised pictures: gradients, paper, lines; light, blur, noise, JPEG.

Owns everything of a randomised picture that is not a shape. All of it works in place on [height, width, 3] float32
pixels of 0 … 255.
"""

from __future__ import annotations

import colorsys
import io

import numpy as np
import numpy.typing as npt
from PIL import Image

Floats = npt.NDArray[np.float32]

# Hue in degrees, saturation, value: from … to. What lies between two names is nobody's.
_SHADES = {
    "red": ((-12, 9), (0.62, 1.0), (0.55, 1.0)),
    "orange": ((20, 39), (0.65, 1.0), (0.8, 1.0)),
    "yellow": ((46, 62), (0.5, 1.0), (0.78, 1.0)),
    "green": ((88, 162), (0.38, 1.0), (0.36, 1.0)),
    "blue": ((200, 242), (0.5, 1.0), (0.45, 1.0)),
    "purple": ((266, 306), (0.38, 1.0), (0.4, 0.95)),
}
_LEVELS = {"white": (222, 255), "grey": (95, 160), "black": (0, 48)}


def shade(name: str, chance: np.random.Generator) -> Floats:
    """[3]: a colour that people call `name`."""
    if name in _LEVELS:
        level = chance.uniform(*_LEVELS[name])
        if chance.random() < 0.4:
            level = {"white": 255, "grey": 128, "black": 0}[name]
        tint = chance.normal(0, 4, 3) * (0 < level < 255)
        if chance.random() < 0.25:  # cream and ivory; near-black and slate, which are mostly bluish
            warm = name == "white" or chance.random() < 0.3
            tint += chance.uniform(0.3, 1.0) * np.array((0, -8, -45) if warm else (-8, -2, 22))
        return np.clip(level + tint, 0, 255).astype(np.float32)
    hue, saturation, value = (chance.uniform(*bounds) for bounds in _SHADES[name])
    if chance.random() < 0.3:
        saturation = value = 1.0 if name != "purple" else 0.6
    return 255 * np.array(colorsys.hsv_to_rgb(hue / 360 % 1, saturation, value), np.float32)


def ramp(height: int, width: int, chance: np.random.Generator) -> Floats:
    """[height, width]: -1 … 1 along a line or outwards from a point."""
    y, x = np.linspace(-1, 1, height, dtype=np.float32)[:, None], np.linspace(-1, 1, width, dtype=np.float32)[None]
    if chance.random() < 0.4:
        cx, cy = chance.uniform(-0.6, 0.6, 2)
        far = np.hypot(x - np.float32(cx), y - np.float32(cy))
        return (far / far.max() * 2 - 1).astype(np.float32)
    turn = chance.uniform(0, 2 * np.pi)
    along = x * np.float32(np.cos(turn)) + y * np.float32(np.sin(turn))
    return (along / np.abs(along).max()).astype(np.float32)


def clouds(height: int, width: int, chance: np.random.Generator) -> Floats:
    """[height, width]: smooth noise of spread 1."""
    coarse = chance.standard_normal((int(chance.integers(3, 12)),) * 2).astype(np.float32)
    return np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), np.float32)


def background(colour: Floats, height: int, width: int, chance: np.random.Generator) -> Floats:
    """[height, width, 3]: plain, or with a gradient, a texture, lines or an edge."""
    picture = np.empty((height, width, 3), np.float32)
    picture[:] = colour
    if chance.random() < 0.3:
        picture += ramp(height, width, chance)[..., None] * chance.uniform(4, 26, 3).astype(np.float32)
    if chance.random() < 0.2:
        picture += clouds(height, width, chance)[..., None] * np.float32(chance.uniform(2, 9))
    if chance.random() < 0.12:
        _lines(picture, chance)
    if chance.random() < 0.1:
        _frame(picture, chance)
    return picture


def _lines(picture: Floats, chance: np.random.Generator) -> None:
    """Ruled or squared paper."""
    ink = (picture.mean(axis=(0, 1)) + chance.choice((-1, 1)) * chance.uniform(15, 60) + chance.normal(0, 10, 3)) / 1
    step, start = chance.uniform(10, 36), chance.uniform(0, 20)
    rows = np.arange(start, picture.shape[0], step).astype(int)
    picture[rows] = ink
    if chance.random() < 0.5:
        picture[:, np.arange(start, picture.shape[1], step).astype(int)] = ink


def _frame(picture: Floats, chance: np.random.Generator) -> None:
    """A frame or axes near the edges, or the table that the paper lies on."""
    height, width = picture.shape[:2]
    ink = chance.uniform(0, 255) * np.ones(3) + chance.normal(0, 25, 3)
    low, high = (np.array([height, width]) * chance.uniform(0.005, 0.06, (2, 2))).astype(int)
    if chance.random() < 0.35:
        side = int(chance.integers(4))
        strip = (np.s_[: low[0]], np.s_[height - high[0] :], np.s_[:, : low[1]], np.s_[:, width - high[1] :])[side]
        picture[strip] = ink
        return
    thick = int(chance.integers(1, 3))
    top, left, bottom, right = low[0], low[1], height - high[0], width - high[1]
    picture[top : top + thick, left:right] = picture[max(0, bottom - thick) : bottom, left:right] = ink
    picture[top:bottom, left : left + thick] = picture[top:bottom, max(0, right - thick) : right] = ink


def develop(picture: Floats, chance: np.random.Generator) -> Floats:
    """The picture as a camera or a codec leaves it; often untouched."""
    height, width = picture.shape[:2]
    photo = chance.random() < 0.3
    if photo:
        light = 1 - chance.uniform(0.02, 0.16) * (1 + ramp(height, width, chance))
        if chance.random() < 0.4:  # the shadow of a hand or a phone
            edge = ramp(height, width, chance) * 8 + np.float32(chance.uniform(-6, 6))
            light = light * (1 - chance.uniform(0.08, 0.3) / (1 + np.exp(-edge)))
        cast = chance.uniform(0.91, 1.05) * (1 + chance.normal(0, 0.025, 3))
        picture = picture * light[..., None].astype(np.float32) * cast.astype(np.float32)
    elif chance.random() < 0.15:
        low = chance.uniform(0, 25)
        picture = np.float32(low) + picture * np.float32(1 - (low + chance.uniform(0, 25)) / 255)
    if chance.random() < (0.5 if photo else 0.08):
        picture = _blurred(picture, int(chance.integers(1, 3)))
    if chance.random() < (0.6 if photo else 0.2):
        grain = chance.standard_normal((height, width, 3 if chance.random() < 0.3 else 1), np.float32)
        picture = picture + grain * np.float32(chance.uniform(1, 11))
    if chance.random() < (0.6 if photo else 0.25):
        picture = _compressed(picture, int(chance.integers(22, 92)))
    return np.clip(picture, 0, 255)


def _blurred(picture: Floats, rounds: int) -> Floats:
    for _ in range(rounds):
        for axis in (0, 1):
            blurred = (np.roll(picture, 1, axis) + 2 * picture + np.roll(picture, -1, axis)) / 4
            picture = np.asarray(blurred, np.float32)
    return picture


def _compressed(picture: Floats, quality: int) -> Floats:
    data = io.BytesIO()
    Image.fromarray(np.clip(picture, 0, 255).astype(np.uint8)).save(data, "JPEG", quality=quality)
    return np.asarray(Image.open(data), np.float32)
