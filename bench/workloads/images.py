"""Images that a workload refers to: drawn from a seed once and kept on disk.

What is drawn compresses as photographs do: neither noise (too large) nor flat (too small). It is a pyramid: each level
doubles the one below and adds detail of its own, with less contrast the finer it is, as natural images have it (their
power falls as 1 / f²); shapes with hard edges lie over it. All arithmetic is in whole numbers, so pixels are equal on
every machine; bytes of a file are equal for equal versions of Pillow and codecs.

The cache may be shared by processes and runs: a file appears whole, under a name that follows from what is drawn.
"""

from __future__ import annotations

import base64
import io
import os
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from bench.record import write_whole
from bench.workloads.distributions import seeded_rng
from bench.workloads.requests import ImageRef

VERSION = 3
"""Goes into names of cached files: raise it with every change of what is drawn."""

QUALITY = 85
"""What phones and web sites use, about 2 bits a pixel for photographs."""

SMALLEST = 6
"""Pixels of the shorter side of the pyramid's first level, about."""
COARSE = 220
"""Contrast of the first level's own detail, of 255; a quarter for colours. Each level halves what is above `FINE`."""
FINE = (5, 27)
"""Contrast of the finest detail: from soft to busy images, by the seed."""
CHROMA_SCALE = 8
"""Colours change this much slower than brightness."""
SHAPES = 14


def render(seed: int, width: int, height: int) -> Image.Image:
    """An image in YCbCr, fixed by its arguments."""
    fine = int(seeded_rng("detail", seed).integers(*FINE))
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


def encode(image: Image.Image) -> bytes:
    """The image as a JPEG."""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


def _pyramid(name: str, width: int, height: int, coarse: int, fine: int) -> Any:
    """Brightness of each pixel, int16, 0 to 255. [height, width]"""
    levels, rng = max(1, (min(width, height) // SMALLEST).bit_length()), seeded_rng(name)
    pixels = np.full((1, 1), 128, dtype=np.int16)
    for level in range(levels):
        across, down = (max(1, side >> (levels - 1 - level)) for side in (width, height))
        larger = Image.fromarray(pixels.astype(np.uint8)).resize((across, down), Image.Resampling.BICUBIC)
        detail = np.frombuffer(rng.bytes(across * down), dtype=np.uint8).reshape(down, across).astype(np.int16) - 128
        contrast = fine + (max(0, coarse - fine) >> level)
        pixels = np.clip(np.asarray(larger, dtype=np.int16) + detail * contrast // 256, 0, 255)
    return pixels


def _shapes(seed: int, width: int, height: int) -> Image.Image:
    """Grey shapes on middle grey, some of them thin."""
    drawn = Image.new("L", (width, height), 128)
    pen, most = ImageDraw.Draw(drawn), (width, height, max(1, width // 3), max(1, height // 3), 176)
    for turn, numbers in enumerate(seeded_rng("shapes", seed).integers(most, size=(SHAPES, 5)).tolist()):
        x, y, wide, tall, grey = (numbers[0], numbers[1], numbers[2] + 1, numbers[3] + 1, numbers[4] + 40)
        if turn % 3 == 0:
            pen.ellipse((x, y, x + wide, y + tall), fill=grey)
        elif turn % 3 == 1:
            pen.polygon([(x, y), (x + wide, y + tall // 2), (x + wide // 3, y + tall)], fill=grey)
        else:
            pen.line([(x, y), (x + wide, y + tall)], fill=grey, width=1 + min(width, height) // 100)
    return drawn


def default_cache() -> Path:
    """`epd-serve/pictures` in XDG_CACHE_HOME, or in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "epd-serve" / "pictures"


class Images:
    """Gives each image as bytes, as a file, or as a data URL.

    Args:
        cache: directory, made when the first image is drawn; None is `default_cache()`.
    """

    def __init__(self, cache: Path | None = None) -> None:
        self._cache = cache or default_cache()

    def file(self, image: ImageRef) -> Path:
        """An absolute path to the image's bytes.

        Raises:
            ConfigError: the cache cannot be written (disk full, no permission).
        """
        name = f"{image.key}-{VERSION}.jpeg"
        path = (self._cache / name[:2] / name).absolute()
        if not path.is_file():
            write_whole(path, encode(render(image.seed, image.width, image.height)), "--cache")
        return path

    def data(self, image: ImageRef) -> bytes:
        """The bytes, as they go on the wire. Raises as `file`."""
        return self.file(image).read_bytes()

    def data_url(self, image: ImageRef) -> str:
        """The same bytes, as an OpenAI `image_url` takes them."""
        return f"data:image/jpeg;base64,{base64.b64encode(self.data(image)).decode()}"
