"""Scenes drawn as other people's code, pens and cameras might draw them (domain randomisation), for training.

Owns the shapes: their outlines in the plane, edges, fills, strokes and shadows. Leaves to others: where they lie
(`placement`), what is behind and in front of them (`backdrops`), the vision tower's format (`raster`). No library
that the foreign pictures of the evaluation are drawn with is used or imitated pixel by pixel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from epd_serve.demo.pictures import GRID, Shape
from tests.demo_model import backdrops
from tests.demo_model.placement import Place, places
from tests.demo_model.scenes import Scene

Floats = npt.NDArray[np.float32]

_REACH = 1.6  # half sizes from its centre: nothing of a shape, turned, and of its shadow lies farther away
_FILLING = 0.5  # of the single shapes in the middle: so large


@dataclass(frozen=True)
class _Style:
    """What the shapes of one picture have in common.

    Attributes:
        softness: width of an edge in pixels.
        block: side of the squares in which edges go, in pixels: 1 is smooth.
        turn: rotation in radians of all of them.
        wobble: how far an edge goes astray, share of the half size: a hand's is not 0.
        rounded: corners of squares, share of the half side.
        gradient, texture: of the fill, in levels.
        stroke: width of the outline, share of the half size; 0 is none.
        ink: of the outline [3]; None is the shape's own, darker or lighter.
        hollow: nothing but the outline, in the shape's colour.
        shadow: how dark, 0 … 1, its offset in half sizes.
    """

    softness: float
    block: int
    turn: float
    wobble: float
    rounded: float
    gradient: float
    texture: float
    stroke: float
    ink: Floats | None
    hollow: bool
    shadow: tuple[float, float, float]


def _style(chance: np.random.Generator) -> _Style:
    def sometimes(share: float, low: float, high: float) -> float:
        return chance.uniform(low, high) if chance.random() < share else 0.0

    ink: Floats | None = None
    if chance.random() < 0.6:
        ink = np.full(3, 0 if chance.random() < 0.6 else 255, np.float32) + chance.normal(0, 12, 3).astype(np.float32)
    hollow = chance.random() < 0.08
    return _Style(
        softness=chance.uniform(0.3, 2.5),
        block=int(chance.integers(2, 7)) if chance.random() < 0.12 else 1,
        turn=sometimes(0.4, -0.3, 0.3),
        wobble=sometimes(0.25, 0.01, 0.06),
        rounded=sometimes(0.25, 0.05, 0.3),
        gradient=sometimes(0.3, 10, 60),
        texture=sometimes(0.2, 3, 18),
        stroke=chance.uniform(0.16, 0.34) if hollow else sometimes(0.3, 0.03, 0.16),
        ink=None if hollow else ink,
        hollow=hollow,
        shadow=(sometimes(0.15, 0.15, 0.5), chance.uniform(-0.2, 0.2), chance.uniform(0.02, 0.25)),
    )


def draw(scene: Scene, resized: tuple[int, int], grows: float, chance: np.random.Generator) -> tuple[Floats, Floats]:
    """Draw a scene at the size (width, height) that the processor would make.

    Args:
        scene: what is shown; of its shapes' cells the picture keeps order and rough place.
        resized: pixels to draw.
        grows: how much larger that is than the scene's own size, at least 1: edges get as much softer.
        chance: everything else.

    Returns:
        [height, width, 3] pixels of 0 … 255 and, per shape, [height, width] coverage of 0 … 1.
    """
    width, height = resized
    behind = backdrops.shade(scene.background, chance)
    picture = backdrops.background(behind, height, width, chance)
    covered = np.zeros((len(scene.shapes), height, width), np.float32)
    style = _style(chance)
    stretch = (width / scene.size[0], height / scene.size[1])
    found = [_large(scene.size, chance)] if _fills(scene, chance) else places(scene.shapes, scene.size, chance)
    for index, (shape, place) in enumerate(zip(scene.shapes, found, strict=True)):
        _draw(picture, covered[index], shape, place, stretch, style, grows, behind, chance)
    return backdrops.develop(picture, chance), covered


def _fills(scene: Scene, chance: np.random.Generator) -> bool:
    """Whether the one shape in the middle is all that there is room for."""
    alone = len(scene.shapes) == 1 and scene.shapes[0].row == scene.shapes[0].column == GRID // 2
    return alone and chance.random() < _FILLING


def _large(size: tuple[int, int], chance: np.random.Generator) -> Place:
    """A place that a shape nearly fills the picture from."""
    half = min(size) * chance.uniform(0.28, 0.48)
    x, y = (side / 2 + chance.uniform(-1, 1) * min(side / 2 - half, side / GRID / 2) for side in size)
    return Place(x, y, half)


def _draw(
    picture: Floats,
    covered: Floats,
    shape: Shape,
    place: Place,
    stretch: tuple[float, float],
    style: _Style,
    grows: float,
    behind: Floats,
    chance: np.random.Generator,
) -> None:
    hx, hy = place.half * stretch[0], place.half * stretch[1]
    x, y = place.x * stretch[0], place.y * stretch[1]
    margin = 1.5 + style.softness * grows
    height, width = covered.shape
    left, right = max(0, int(x - _REACH * hx - margin)), min(width, int(x + _REACH * hx + margin) + 2)
    top, bottom = max(0, int(y - _REACH * hy - margin)), min(height, int(y + _REACH * hy + margin) + 2)
    u = (_grid(left, right, style.block) - np.float32(x))[None] / np.float32(hx)
    v = (_grid(top, bottom, style.block) - np.float32(y))[:, None] / np.float32(hy)
    inside = _inside(shape.kind, u, v, style, chance)
    pixels = np.float32((hx + hy) / 2)
    soft = np.float32(max(0.3, style.softness) * grows if style.block == 1 else 0.3)
    mask = np.clip(inside * pixels / soft + 0.5, 0, 1)
    colour = _visible(shape.colour, behind, chance)
    area = np.s_[top:bottom, left:right]
    part = picture[area]
    dark, sx, sy = style.shadow
    if dark:
        cast = np.clip(_moved(inside, round(sy * hy), round(sx * hx)) * 2.5 + 0.5, 0, 1)
        part *= 1 - np.float32(dark) * cast[..., None]
    fill = np.broadcast_to(colour, part.shape)
    high, wide = mask.shape
    if style.gradient:
        fill = fill + backdrops.ramp(high, wide, chance)[..., None] * np.float32(style.gradient)
    if style.texture:
        fill = fill + backdrops.clouds(high, wide, chance)[..., None] * np.float32(style.texture)
    if style.hollow:
        mask = mask * np.clip((style.stroke - inside) * pixels / soft + 0.5, 0, 1)
    elif style.stroke:
        ink = style.ink if style.ink is not None else colour * np.float32(chance.uniform(0.3, 0.8))
        rim = np.clip((style.stroke - inside) * pixels / soft + 0.5, 0, 1)[..., None]
        fill = fill + rim * (ink - fill)
    part += mask[..., None] * (np.clip(fill, 0, 255) - part)
    covered[area] = np.clip(inside * pixels + 0.5, 0, 1)


def _moved(plane: Floats, down: int, right: int) -> Floats:
    """The plane moved by whole pixels; -1 comes in from its edges."""
    height, width = plane.shape
    moved = np.full_like(plane, -1)
    to = np.s_[max(0, down) : height + min(0, down), max(0, right) : width + min(0, right)]
    moved[to] = plane[max(0, -down) : height - max(0, down), max(0, -right) : width - max(0, right)]
    return moved


def _grid(start: int, end: int, block: int) -> Floats:
    at = np.arange(start, end, dtype=np.float32)
    return (at // block) * block + np.float32(block / 2)


def _visible(name: str, behind: Floats, chance: np.random.Generator) -> Floats:
    """A shade of the colour that stands out from the background."""
    for _ in range(6):
        colour = backdrops.shade(name, chance)
        if np.abs(colour - behind).max() > 70:
            break
    return colour


def _inside(kind: str, u: Floats, v: Floats, style: _Style, chance: np.random.Generator) -> Floats:
    """Signed distance to the edge in half sizes, positive inside, of every pixel (u, v), where the shape is -1 … 1."""
    turn = style.turn + chance.normal(0, 0.03)
    if kind == "triangle" and chance.random() < 0.08:
        turn += np.pi
    aspect = np.exp(chance.normal(0, 0.05))
    cos, sin = np.float32(np.cos(turn)), np.float32(np.sin(turn))
    u, v = (
        np.asarray((u * cos + v * sin) * np.float32(aspect), np.float32),
        np.asarray((v * cos - u * sin) / np.float32(aspect), np.float32),
    )
    inside: npt.NDArray[Any]
    if kind == "circle":
        inside = 1 - np.hypot(u, v)
    elif kind == "square":
        size = np.float32(1.0 / max(1.0, float(abs(cos) + abs(sin) - 0.15)))
        corner = np.float32(style.rounded) * size
        a, b = np.abs(u) - (size - corner), np.abs(v) - (size - corner)
        inside = corner - np.hypot(np.maximum(a, 0), np.maximum(b, 0)) - np.minimum(np.maximum(a, b), 0)
    else:
        inside = _triangle(u, v, chance)
    if style.wobble:
        angle = np.arctan2(v, u)
        for times in (2, 3, 5):
            inside = inside + np.float32(style.wobble / 1.7) * np.sin(
                times * angle + np.float32(chance.uniform(0, 6.3))
            )
    return np.asarray(inside, np.float32)


def _triangle(u: Floats, v: Floats, chance: np.random.Generator) -> Floats:
    """Isosceles of several heights, now and then with a right angle, corners a little astray."""
    rise = chance.uniform(0.7, 1.0)
    apex = chance.choice((-1.0, 1.0)) if chance.random() < 0.1 else chance.normal(0, 0.08)
    corners = np.array([(apex, -rise), (1, rise), (-1, rise)]) + chance.normal(0, 0.025, (3, 2))
    inside = None
    for (ax, ay), (bx, by) in zip(corners, np.roll(corners, -1, axis=0), strict=True):
        long = np.hypot(bx - ax, by - ay)
        nx, ny = np.float32(-(by - ay) / long), np.float32((bx - ax) / long)
        edge = (u - np.float32(ax)) * nx + (v - np.float32(ay)) * ny
        inside = edge if inside is None else np.minimum(inside, edge)
    assert inside is not None
    return inside
