"""A user's own workload: a directory of images and a file of requests, one JSON object a line.

The lines are AISBench's `mm_custom`, so that one file serves both:
`{"type": "image", "path": ["a.jpg"], "question": "What is this?", "answer": "", "max_out_len": 64, "timestamp": 250}`.
Only `question` has to be there. `path` lists images, relative to the directory or absolute (none: text only);
`timestamp` is milliseconds from the start, in all lines or in none, ascending. `type`, if given, is `image`; `answer`
and other keys are ignored. A run longer than the file begins again at its first line.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal, cast

import msgspec
from PIL import Image

from bench.workloads.profiles import OUTPUT_TOKENS
from bench.workloads.spec import MIME, ImageFormat, ImageRef, RequestSpec
from bench.workloads.text import Words
from epd_serve.errors import ConfigError

NAME = "own"
"""What the workload is called on the command line."""


class _Line(msgspec.Struct):
    question: Annotated[str, msgspec.Meta(pattern=r"\S")]
    type: Literal["image"] = "image"
    path: list[Annotated[str, msgspec.Meta(min_length=1)]] = []
    max_out_len: Annotated[int, msgspec.Meta(ge=1)] = OUTPUT_TOKENS
    timestamp: Annotated[float, msgspec.Meta(ge=0)] | None = None


_decode = msgspec.json.Decoder(_Line).decode


def read_dataset(directory: Path, prompts: Path, words: Words) -> Sequence[RequestSpec]:
    """The requests of the file, each image looked at.

    Args:
        directory: what relative paths of images start from.
        words: counts the tokens of each text.

    Raises:
        ConfigError: naming file, line and field: no such directory or file, a line that is not such an object, an image
            that is missing or does not decode, times that are not in order, an empty file.
    """
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory of images", param="--pictures")
    try:
        lines = prompts.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{prompts} cannot be read: {error}", param="--prompts") from error
    look_once = lru_cache(maxsize=None)(look)
    requests: list[RequestSpec] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = _decode(line)
            request = RequestSpec(
                id=f"{NAME}-{len(requests)}",
                text=row.question,
                images=tuple(look_once(directory / name) for name in row.path),
                max_tokens=row.max_out_len,
                text_tokens=words.count(row.question),
                arrival_s=None if row.timestamp is None else row.timestamp / 1000,
            )
            before = requests[-1].arrival_s if requests else request.arrival_s
            if (before is None) != (request.arrival_s is None):
                raise ValueError("`timestamp` has to be in all lines or in none")
            if before is not None and request.arrival_s is not None and request.arrival_s < before:
                raise ValueError(f"`timestamp` {row.timestamp:g} is before the {before * 1000:g} of the line above")
        except (ValueError, msgspec.DecodeError) as error:
            raise ConfigError(f"{prompts}:{number}: {error}", param="--prompts") from error
        requests.append(request)
    if not requests:
        raise ConfigError(f"{prompts} holds no request", param="--prompts")
    return requests


def repeated(requests: Sequence[RequestSpec]) -> Iterator[RequestSpec]:
    """The requests over and over, later rounds with ids of their own; times go on after a mean gap."""
    yield from requests
    times = [request.arrival_s for request in requests if request.arrival_s is not None]
    span_s = times[-1] - times[0] if times else 0.0
    period_s = span_s + span_s / max(1, len(times) - 1)
    for turn in itertools.count(1):
        for request in requests:
            arrival_s = None if request.arrival_s is None else request.arrival_s + turn * period_s
            yield replace(request, id=f"{request.id}-again-{turn}", arrival_s=arrival_s)


def look(path: Path) -> ImageRef:
    """An image's size and format, by its bytes; it is decoded whole.

    Raises:
        ValueError: it is missing, unreadable or of a format that no client sends.
    """
    try:
        with Image.open(path) as image:
            form, (width, height) = (image.format or "").lower(), image.size
            image.load()
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:  # SyntaxError: how Pillow reports broken PNG
        raise ValueError(f"image {path} cannot be read: {error}") from error
    if form not in MIME:
        raise ValueError(f"image {path} is {form.upper()}: use one of {', '.join(MIME)}")
    return ImageRef(width, height, cast(ImageFormat, form), path=path.absolute())
