"""What a workload consists of: requests as frozen data. No bytes are made here, nothing is sent.

A workload is a lazy sequence of `RequestSpec`. It is equal for equal (name, seed, knobs) on every machine; images are
references that `bench/workloads/images.py` turns into bytes, arrivals are put on by `bench/workloads/arrivals.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

ImageFormat = Literal["jpeg", "png", "webp", "gif", "bmp"]

MIME: Mapping[ImageFormat, str] = {name: f"image/{name}" for name in get_args(ImageFormat)}
"""Of a data URL, by format."""


@dataclass(frozen=True, slots=True)
class ImageRef:
    """An image that is not in memory: rendered from a seed, or a file of the user's.

    Equal references have equal bytes, so that a repeated image is one and the same reference.

    Attributes:
        width, height: pixels.
        format: of the encoded bytes; of a file it is what the bytes say, whatever the name ends in.
        seed: of the drawing; None for a file.
        path: absolute, of the user's file; None for a drawing.
    """

    width: int
    height: int
    format: ImageFormat
    seed: int | None = None
    path: Path | None = None

    def __post_init__(self) -> None:
        assert (self.seed is None) != (self.path is None), "an image is drawn from a seed or read from a path"
        assert self.width > 0 and self.height > 0

    @property
    def key(self) -> str:
        """A name for the image, safe in file names. Of a file it follows the path, not the bytes."""
        source = f"file:{self.path}" if self.path is not None else f"seed:{self.seed}"
        return hashlib.sha256(f"{source}:{self.width}x{self.height}:{self.format}".encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One request.

    Attributes:
        id: unique within the workload, e.g. `sharegpt4o-like-0-17` (name, seed, number).
        text: of the user's message. text_tokens: how many tokens it has by the tokenizer that made it, or by the rule
            of `bench/workloads/generate.py` without one.
        images: in the order in which they stand before the text; empty for a text-only request.
        max_tokens: tokens to answer with; clients send `ignore_eos` so that it is exactly that many.
        arrival_s: seconds from the start of the run at which it is due; None in a closed loop.
        pace: how many times the usual rate requests arrive at around this one (> 0, 1 in a workload without bursts).
            Arrivals divide the gap before the request by it; over a whole workload the mean of 1 / pace is 1.
    """

    id: str
    text: str
    images: tuple[ImageRef, ...]
    max_tokens: int
    text_tokens: int
    arrival_s: float | None = None
    pace: float = 1.0

    def __post_init__(self) -> None:
        assert self.max_tokens > 0 and self.pace > 0
        assert self.arrival_s is None or self.arrival_s >= 0

    @property
    def text_only(self) -> bool:
        return not self.images
