"""A user's own workload: a directory of pictures and a file of requests, one JSON object a line.

The lines are AISBench's `mm_custom`, so that one file serves both:
`{"type": "image", "path": ["a.jpg"], "question": "What is this?", "answer": "", "max_out_len": 64, "timestamp": 250}`.
Only `question` has to be there. `path` lists pictures, relative to the directory or absolute (none: text only);
`timestamp` is milliseconds from the start, in all lines or in none, ascending. `type`, if given, is `image`; `answer`
and other keys are ignored. A run longer than the file begins again at its first line.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from PIL import Image, UnidentifiedImageError

from bench.workloads.profiles import OUTPUT_TOKENS
from bench.workloads.spec import MIME, PictureFormat, PictureRef, RequestSpec
from bench.workloads.text import Words
from epd_serve.errors import ConfigError

NAME = "own"
"""What the workload is called on the command line."""


def read_own(pictures: Path, prompts: Path, words: Words) -> Sequence[RequestSpec]:
    """The requests of the file, each picture looked at.

    Args:
        pictures: what relative paths start from.
        words: counts the tokens of each text.

    Raises:
        ConfigError: naming file and line: no such directory or file, a line that is not such an object, a picture that
            is missing or does not decode, an empty file.
    """
    if not pictures.is_dir():
        raise ConfigError(f"{pictures} is not a directory of pictures", param="--pictures")
    try:
        lines = prompts.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{prompts} cannot be read: {error}", param="--prompts") from error
    seen: dict[Path, PictureRef] = {}
    found: list[RequestSpec] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append(_request(line, len(found), pictures, seen, words))
            _check_order(found)
        except ValueError as error:
            raise ConfigError(f"{prompts}:{number}: {error}", param="--prompts") from error
    if not found:
        raise ConfigError(f"{prompts} holds no request", param="--prompts")
    return found


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


def look(path: Path) -> PictureRef:
    """A picture's size and format, by its bytes; it is decoded whole.

    Raises:
        ValueError: it is missing, unreadable or of a format that no client sends.
    """
    try:
        with Image.open(path) as picture:
            form, size = (picture.format or "").lower(), picture.size
            picture.load()
    except FileNotFoundError:
        raise ValueError(f"picture {path} is missing") from None
    except UnidentifiedImageError:
        raise ValueError(f"picture {path} is not a picture that Pillow knows") from None
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:  # SyntaxError: how Pillow reports broken PNG
        raise ValueError(f"picture {path} cannot be decoded: {error}") from error
    if form not in MIME:
        raise ValueError(f"picture {path} is {form.upper()}: use one of {', '.join(MIME)}")
    return PictureRef(*size, cast(PictureFormat, form), path=path.absolute())


def _request(line: str, index: int, base: Path, seen: dict[Path, PictureRef], words: Words) -> RequestSpec:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"a JSON object is needed, this is {type(row).__name__}")
    question = row.get("question")
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f'"question" has to be a text, it is {question!r}')
    if row.get("type", "image") != "image":
        raise ValueError(f'"type" is {row["type"]!r}: only "image" is supported')
    shown = row.get("path", [])
    if isinstance(shown, str) or not isinstance(shown, list) or not all(isinstance(one, str) and one for one in shown):
        raise ValueError(f'"path" has to be a list of file names, it is {shown!r}')
    references = []
    for name in shown:
        path = base / name
        if path not in seen:
            seen[path] = look(path)
        references.append(seen[path])
    return RequestSpec(
        id=f"{NAME}-{index}",
        text=question,
        pictures=tuple(references),
        max_tokens=_output(row),
        text_tokens=words.count(question),
        arrival_s=_time(row),
    )


def _output(row: Mapping[str, Any]) -> int:
    value = row.get("max_out_len", OUTPUT_TOKENS)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f'"max_out_len" has to be a whole number of 1 or more, it is {value!r}')
    return value


def _time(row: Mapping[str, Any]) -> float | None:
    value = row.get("timestamp")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f'"timestamp" has to be milliseconds, 0 or more, it is {value!r}')
    return value / 1000


def _check_order(found: Sequence[RequestSpec]) -> None:
    """Of the line read last."""
    if len(found) < 2:
        return
    before, now = found[-2].arrival_s, found[-1].arrival_s
    if (before is None) != (now is None):
        raise ValueError('"timestamp" has to be in all lines or in none')
    if before is not None and now is not None and now < before:
        raise ValueError(f'"timestamp" {now * 1000:g} is before the {before * 1000:g} of the line above')
