"""Drawings in felt pen on paper, as a phone would photograph them: by a shaky hand, from an angle, in a room's light.

Simulated with OpenCV and numpy; no real photograph is among them.
"""

from __future__ import annotations

import cv2
import numpy as np
import numpy.typing as npt

from epd_serve.demo.pictures import Shape
from tests.demo_model.foreign.sketches import Sketch, corners
from tests.demo_model.placement import Place

Pixels = npt.NDArray[np.float32]

_INKS = {  # red, green, blue
    "red": (205, 35, 45),
    "green": (35, 140, 65),
    "blue": (35, 70, 185),
    "yellow": (240, 212, 50),
    "purple": (120, 50, 150),
    "orange": (240, 130, 35),
}
_SHORTER = 600  # pixels of the photograph's shorter side


def draw(sketch: Sketch, chance: np.random.Generator) -> bytes:
    """The bytes of a JPEG."""
    scale = _SHORTER / min(sketch.size)
    width, height = round(sketch.size[0] * scale), round(sketch.size[1] * scale)
    paper = np.full((height, width, 3), 1, np.float32) * chance.uniform(232, 250)
    paper += np.array([3, 1, -4], np.float32) * np.float32(chance.uniform(-1, 2))
    fibres = cv2.GaussianBlur(chance.standard_normal((height, width), np.float32), (0, 0), 1.5)
    paper += 6 * fibres[..., None]
    if chance.random() < 0.25:
        step = int(chance.integers(25, 50))
        paper[::step] *= np.array([0.82, 0.88, 0.95], np.float32)
        if chance.random() < 0.5:
            paper[:, ::step] *= np.array([0.82, 0.88, 0.95], np.float32)
    hatched = chance.random() < 0.4
    for shape, place in zip(sketch.shapes, sketch.places, strict=True):
        _ink(paper, shape, Place(place.x * scale, place.y * scale, place.half * scale), hatched, chance)
    photo = _lit(_from_an_angle(paper, chance), chance)
    blurred = cv2.GaussianBlur(photo, (0, 0), chance.uniform(0.5, 2.2))
    grainy = blurred + chance.normal(0, chance.uniform(1, 7), photo.shape)
    rgb = np.clip(grainy, 0, 255).astype(np.uint8)
    quality = [cv2.IMWRITE_JPEG_QUALITY, int(chance.integers(45, 90))]
    done, data = cv2.imencode(".jpg", cv2.cvtColor(rgb, cv2.COLOR_RGB2BGR), quality)
    assert done
    return data.tobytes()


def _ink(paper: Pixels, shape: Shape, place: Place, hatched: bool, chance: np.random.Generator) -> None:
    """Ink darkens the paper as a filter does: the outline in full, the inside flat or in strokes side by side."""
    outline = _by_hand(shape, place, chance)
    points = [np.round(outline * 16).astype(np.int32)]
    flat = np.zeros(paper.shape[:2], np.uint8)
    cv2.fillPoly(flat, points, 255, cv2.LINE_AA, 4)
    fill = flat.astype(np.float32) / 255
    if hatched:
        strokes = np.zeros_like(flat)
        thick = max(3, round(place.half * 0.14))
        turn = chance.uniform(0.3, 1.2)
        along, across = np.array([np.cos(turn), np.sin(turn)]), np.array([-np.sin(turn), np.cos(turn)])
        for offset in np.arange(-1.5 * place.half, 1.5 * place.half, thick * 1.15):
            middle = np.array([place.x, place.y]) + across * offset
            ends = np.stack([middle + along * 2 * place.half * sign + chance.normal(0, 1.5, 2) for sign in (-1, 1)])
            cv2.polylines(strokes, [ends.astype(np.int32)], False, 255, thick, cv2.LINE_AA)
        fill = fill * (0.15 + 0.85 * strokes.astype(np.float32) / 255)
    rim = np.zeros_like(flat)
    cv2.polylines(rim, points, True, 255, max(2, round(place.half * 0.08)), cv2.LINE_AA, 4)
    blots = 1 + 0.06 * cv2.GaussianBlur(chance.standard_normal(flat.shape, np.float32), (0, 0), 6) * 6
    cover = np.clip(np.maximum(fill * chance.uniform(0.85, 1.0), rim.astype(np.float32) / 255) * blots, 0, 1)
    ink = np.clip(np.array(_INKS[shape.colour]) + chance.normal(0, 8, 3), 0, 255) / 245
    paper *= (1 - cover[..., None] * (1 - ink)).astype(np.float32)


def _by_hand(shape: Shape, place: Place, chance: np.random.Generator) -> Pixels:
    """[points, 2]: an outline that a hand would draw."""
    if shape.kind == "circle":
        angle = np.linspace(0, 2 * np.pi, 60, endpoint=False)
        wave = sum(chance.normal(0, 0.018) * np.cos(times * angle + chance.uniform(0, 6)) for times in (2, 3, 4))
        radius = place.half * (1 + wave)
        return np.stack([place.x + radius * np.cos(angle), place.y + radius * np.sin(angle)], 1).astype(np.float32)
    bent = np.array(corners(shape.kind, place, chance.normal(0, 0.08))) + chance.normal(0, 0.05 * place.half, (2,))
    bent += chance.normal(0, 0.05 * place.half, bent.shape)
    sides = []
    for one, other in zip(bent, np.roll(bent, -1, axis=0), strict=True):
        share = np.linspace(0, 1, 12, endpoint=False)[:, None]
        bow = np.array([one[1] - other[1], other[0] - one[0]]) * chance.normal(0, 0.02)
        sides.append(one + (other - one) * share + bow * 4 * share * (1 - share))
    return np.concatenate(sides).astype(np.float32)


def _from_an_angle(paper: Pixels, chance: np.random.Generator) -> Pixels:
    """The sheet on a table, a little turned; it fills the photograph or nearly so."""
    height, width = paper.shape[:2]
    whole = np.array([(0, 0), (width, 0), (width, height), (0, height)], np.float32)
    inwards = np.array([(1, 1), (-1, 1), (-1, -1), (1, -1)]) * [width, height]
    seen = (whole + inwards * chance.uniform(0, 0.05, (4, 2))).astype(np.float32)
    table = [
        float(it) for it in chance.uniform(0.7, 1.0) * np.array(((150, 110, 75), (90, 90, 95))[chance.integers(2)])
    ]
    matrix = cv2.getPerspectiveTransform(whole, seen)
    return np.asarray(
        cv2.warpPerspective(paper, matrix, (width, height), borderMode=cv2.BORDER_CONSTANT, borderValue=table),
        np.float32,
    )


def _lit(paper: Pixels, chance: np.random.Generator) -> Pixels:
    """Light from a side, a warm or a cold lamp, often the shadow of the phone."""
    height, width = paper.shape[:2]
    turn = chance.uniform(0, 2 * np.pi)
    y, x = np.linspace(-1, 1, height)[:, None], np.linspace(-1, 1, width)[None]
    light = chance.uniform(0.78, 1.0) + chance.uniform(0, 0.14) * (x * np.cos(turn) + y * np.sin(turn))
    light = light - chance.uniform(0, 0.1) * (x**2 + y**2)
    if chance.random() < 0.4:
        sharp = np.zeros((height, width), np.float32)
        side = np.array(
            [(0, 0), (width * chance.uniform(0.2, 0.7), 0), (width * chance.uniform(0.1, 0.5), height), (0, height)]
        )
        cv2.fillPoly(sharp, [side.astype(np.int32)], 1.0)
        shade = cv2.GaussianBlur(sharp, (0, 0), 0.05 * width)
        light = light * (1 - chance.uniform(0.1, 0.3) * (shade if chance.random() < 0.5 else shade[:, ::-1]))
    lamp = np.array([1, 1, 1]) + chance.uniform(-1, 1) * np.array([0.05, 0.01, -0.06])
    return (paper * light[..., None] * lamp).astype(np.float32)
