"""Scenes as the vision tower's input, drawn directly at the size that the processor would resize to.

Owns a fast drawing of what `pictures.draw` followed by the picture processor gives: edges are smoothed by their
distance to each pixel, so nothing is drawn large and scaled down. Small pictures, which the processor enlarges, get
soft edges. Also owns what the vision tower is taught about each picture token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image

from epd_serve.demo.pictures import BACKGROUNDS, COLOURS, FILL, GRID, KINDS, Shape
from tests.demo_model import randomised
from tests.demo_model.architecture import FACTOR, MERGE, PATCH, picture_grid
from tests.demo_model.scenes import Scene

Floats = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]

_COVERED = 0.12  # of a token's pixels: less of a shape than this is not asked for
NAMES = [f"{colour} {kind}" for colour in COLOURS for kind in KINDS]


@dataclass(frozen=True)
class Raster:
    """One picture.

    Attributes:
        patches: [rows * columns, 3 * PATCH * PATCH], normalised to -1 … 1, in the processor's order: blocks of 2x2
            patches that become one token, row by row. One frame only; the processor doubles it.
        labels: [tokens, 3]: the shape that covers most of the token (0: none, else 1 + index in `NAMES`), its rank in
            the listing (0: none, else 1 …), the token's cell (0 to 8).
    """

    patches: Floats
    labels: Labels


def rasterize(scene: Scene, chance: np.random.Generator | None = None, randomised_share: float = 0.0) -> Raster:
    """Draw one scene.

    Args:
        scene: what is drawn.
        chance: lets sizes, places and colours vary a little around what `pictures.draw` does.
        randomised_share: how many are drawn as others might draw them instead (`randomised`), 0 … 1.
    """
    rows, columns = picture_grid(*scene.size)
    height, width = rows * PATCH, columns * PATCH
    grows = max(1.0, width / scene.size[0], height / scene.size[1])
    if chance is not None and chance.random() < randomised_share:
        picture, covered = randomised.draw(scene, (width, height), grows, chance)
        return Raster(_patches(picture / 127.5 - 1.0, rows, columns), _labels(scene, covered, rows, columns))
    picture = np.empty((height, width, 3), np.float32)
    picture[:] = _colour(BACKGROUNDS[scene.background], chance)
    covered = np.zeros((len(scene.shapes), height, width), np.float32)
    for index, shape in enumerate(scene.shapes):
        top, left, mask = _mask(shape, scene.size, (width, height), grows, chance)
        where = np.s_[top : top + mask.shape[0], left : left + mask.shape[1]]
        picture[where] += mask[..., None] * (_colour(COLOURS[shape.colour], chance) - picture[where])
        covered[index][where] = mask
    return Raster(_patches(picture / 127.5 - 1.0, rows, columns), _labels(scene, covered, rows, columns))


def _colour(rgb: tuple[int, int, int], chance: np.random.Generator | None) -> Floats:
    colour = np.array(rgb, np.float32)
    return colour if chance is None else np.clip(colour + chance.normal(0, 4, 3), 0, 255).astype(np.float32)


def _mask(
    shape: Shape,
    original: tuple[int, int],
    resized: tuple[int, int],
    softness: float,
    chance: np.random.Generator | None,
) -> tuple[int, int, Floats]:
    """(top, left, coverage 0 … 1 of the pixels from there) of one shape."""
    cell = [side / GRID for side in resized]
    half = min(original) / GRID * FILL / 2
    hx, hy = (half * new / old for new, old in zip(resized, original, strict=True))
    x, y = (shape.column + 0.5) * cell[0], (shape.row + 0.5) * cell[1]
    if chance is not None:
        scale = chance.uniform(0.85, 1.1)
        hx, hy = hx * scale, hy * scale
        x += chance.uniform(-0.05, 0.05) * cell[0]
        y += chance.uniform(-0.05, 0.05) * cell[1]
    margin = softness
    left, right = max(0, int(x - hx - margin)), min(resized[0], int(x + hx + margin) + 2)
    top, bottom = max(0, int(y - hy - margin)), min(resized[1], int(y + hy + margin) + 2)
    dx = (np.arange(left, right, dtype=np.float32) + 0.5 - x)[None, :]
    dy = (np.arange(top, bottom, dtype=np.float32) + 0.5 - y)[:, None]
    # Signed distances to the edge in pixels, positive inside.
    if shape.kind == "circle":
        inside = (1.0 - np.sqrt((dx / hx) ** 2 + (dy / hy) ** 2)) * ((hx + hy) / 2)
    elif shape.kind == "square":
        inside = np.minimum(hx - np.abs(dx), hy - np.abs(dy))
    else:
        slope = 2 * hy / hx  # the slanted sides: from the apex (0, -hy) down to (±hx, hy)
        inside = np.minimum((dy + hy - slope * np.abs(dx)) / np.hypot(1.0, slope), hy - dy)
    return top, left, np.clip(inside / softness + 0.5, 0.0, 1.0).astype(np.float32)


def _patches(picture: Floats, rows: int, columns: int) -> Floats:
    """[height, width, 3] → [rows * columns, 3 * PATCH * PATCH] in the processor's order."""
    blocks = picture.reshape(rows // MERGE, MERGE, PATCH, columns // MERGE, MERGE, PATCH, 3)
    return np.ascontiguousarray(blocks.transpose(0, 3, 1, 4, 6, 2, 5)).reshape(rows * columns, 3 * PATCH**2)


def _labels(scene: Scene, covered: Floats, rows: int, columns: int) -> Labels:
    high, wide = rows // MERGE, columns // MERGE
    labels = np.zeros((high, wide, 3), np.int64)
    if scene.shapes:
        share = covered.reshape(len(scene.shapes), high, FACTOR, wide, FACTOR).mean(axis=(2, 4))
        most, seen = share.argmax(axis=0), share.max(axis=0) > _COVERED
        names = np.array([1 + NAMES.index(str(shape)) for shape in scene.shapes])
        labels[..., 0] = np.where(seen, names[most], 0)
        labels[..., 1] = np.where(seen, most + 1, 0)
    row = ((np.arange(high) + 0.5) / high * GRID).astype(np.int64)
    column = ((np.arange(wide) + 0.5) / wide * GRID).astype(np.int64)
    labels[..., 2] = row[:, None] * GRID + column[None, :]
    return labels.reshape(-1, 3)


def from_picture(picture: Image.Image) -> Raster:
    """A real picture as the processor would resize and normalise it; its labels are unknown (zeros)."""
    rows, columns = picture_grid(picture.width, picture.height)
    resized = picture.convert("RGB").resize((columns * PATCH, rows * PATCH), Image.Resampling.BICUBIC)
    pixels = np.asarray(resized, np.float32) / 127.5 - 1.0
    return Raster(_patches(pixels, rows, columns), np.zeros((rows * columns // MERGE**2, 3), np.int64))
