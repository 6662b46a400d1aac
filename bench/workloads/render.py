"""Pictures drawn from a seed that compress as photographs do: neither noise (too large) nor flat (too small).

A picture is a pyramid: each level doubles the one below and adds detail of its own, with less contrast the finer it
is, as natural pictures have it (their power falls as 1 / f²); shapes with hard edges lie over it. All arithmetic is in
whole numbers, so pixels are equal on every machine; bytes of a file are equal for equal versions of Pillow and codecs.
"""

from __future__ import annotations

import hashlib
import io
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from bench.workloads.chance import Chance
from bench.workloads.spec import PictureFormat

VERSION = 1
"""Goes into names of cached files: raise it with every change of what is drawn."""

QUALITY = 85
"""Of JPEG and WebP: what phones and web sites use, about 2 bits a pixel for photographs."""

SMALLEST = 6
"""Pixels of the shorter side of the pyramid's first level, about."""
COARSE = 220
"""Contrast of the first level's own detail, of 255; a quarter for colours. Each level halves what is above `FINE`."""
FINE = (5, 27)
"""Contrast of the finest detail: from soft to busy pictures, by the seed."""
CHROMA_SCALE = 8
"""Colours change this much slower than brightness."""
SHAPES = 14
TILE = 512
"""Detail repeats after so many pixels, which no codec and no encoder for pictures notices."""


def render(seed: int, width: int, height: int) -> Image.Image:
    """A picture in YCbCr, fixed by its arguments."""
    soft, busy = FINE
    fine = soft + Chance("detail", seed).below(busy - soft)
    brightness = _pyramid(f"{seed}/y", width, height, COARSE, fine)
    shapes = np.asarray(_shapes(seed, width, height), dtype=np.int16)
    np.clip(brightness + (shapes - 128) // 2, 0, 255, out=brightness)
    small = (max(1, width // CHROMA_SCALE), max(1, height // CHROMA_SCALE))
    colours = [
        Image.fromarray(_pyramid(f"{seed}/{name}", *small, COARSE // 4, fine // 2).astype(np.uint8)).resize(
            (width, height), Image.Resampling.BILINEAR
        )
        for name in ("cb", "cr")
    ]
    return Image.merge("YCbCr", [Image.fromarray(brightness.astype(np.uint8)), *colours])


def encode(picture: Image.Image, form: PictureFormat) -> bytes:
    """As a file of that format."""
    file = io.BytesIO()
    if form == "jpeg":
        picture.save(file, "JPEG", quality=QUALITY)
    elif form == "webp":
        picture.convert("RGB").save(file, "WEBP", quality=QUALITY)
    else:
        picture.convert("RGB").save(file, form.upper())
    return file.getvalue()


def _pyramid(name: str, width: int, height: int, coarse: int, fine: int) -> Any:
    """Brightness of each pixel, int16, 0 to 255. [height, width]"""
    levels = max(1, (min(width, height) // SMALLEST).bit_length())
    found = np.full((1, 1), 128, dtype=np.int16)
    for level in range(levels):
        across, down = (max(1, side >> (levels - 1 - level)) for side in (width, height))
        larger = Image.fromarray(found.astype(np.uint8)).resize((across, down), Image.Resampling.BICUBIC)
        found = np.asarray(larger, dtype=np.int16)
        contrast = fine + (max(0, coarse - fine) >> level)
        found = found + _detail(f"{name}/{level}", across, down) * contrast // 256
        np.clip(found, 0, 255, out=found)
    return found


def _detail(name: str, width: int, height: int) -> Any:
    """Noise from -128 to 127, int16. [height, width]"""
    across, down = min(width, TILE), min(height, TILE)
    drawn = np.frombuffer(hashlib.shake_256(name.encode()).digest(across * down), dtype=np.uint8)
    tile = drawn.reshape(down, across).astype(np.int16) - 128
    return np.tile(tile, (-(-height // down), -(-width // across)))[:height, :width]


def _shapes(seed: int, width: int, height: int) -> Image.Image:
    """Grey shapes on middle grey, some of them thin."""
    chance, picture = Chance("shapes", seed), Image.new("L", (width, height), 128)
    pen = ImageDraw.Draw(picture)
    for turn in range(SHAPES):
        x, y = chance.below(width), chance.below(height)
        wide, tall = 1 + chance.below(max(1, width // 3)), 1 + chance.below(max(1, height // 3))
        grey = 40 + chance.below(176)
        if turn % 3 == 0:
            pen.ellipse((x, y, x + wide, y + tall), fill=grey)
        elif turn % 3 == 1:
            pen.polygon([(x, y), (x + wide, y + tall // 2), (x + wide // 3, y + tall)], fill=grey)
        else:
            pen.line([(x, y), (x + wide, y + tall)], fill=grey, width=1 + min(width, height) // 100)
    return picture
