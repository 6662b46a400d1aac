"""A workload that a command can run: a profile or the user's own file, with its knobs and its arrivals.

The flags are here, so that every command that loads a server takes the same ones. A user's own workload is a directory
of images and a file of requests, one JSON object a line, as AISBench's `mm_custom`, so that one file serves both:
`{"type": "image", "path": ["a.jpg"], "question": "What is this?", "answer": "", "max_out_len": 64, "timestamp": 250}`.
Only `question` has to be there. `path` lists images, relative to the directory or absolute (none: text only);
`timestamp` is milliseconds from the start, in all lines or in none, ascending. `type`, if given, is `image`; `answer`
and other keys are ignored. A run longer than the file begins again at its first line.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal, cast

import msgspec
from PIL import Image

from bench.workloads.generate import Knobs, Words, requests, words
from bench.workloads.images import default_cache
from bench.workloads.profiles import OUTPUT_TOKENS, PROFILES, profile
from bench.workloads.requests import (
    MIME,
    Arrivals,
    ClosedLoop,
    ImageFormat,
    ImageRef,
    Poisson,
    RequestSpec,
    with_arrivals,
)
from bench.workloads.traffic import recorded
from epd_serve.errors import ConfigError

OWN, RECORDED = "own", "recorded:"
"""What workloads of the user's own are called on the command line; a file follows the second."""


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
                id=f"{OWN}-{len(requests)}",
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


@dataclass(frozen=True)
class Workload:
    """Requests that can be asked for as often as one likes: they are the same each time.

    Attributes:
        name: of a profile, or `own`.
        count: requests of a run.
        arrivals: None leaves requests as they are: without times, or with those of the user's file.
        own: what the user's file says; empty for a profile.
    """

    name: str
    count: int
    knobs: Knobs
    arrivals: Arrivals | None = None
    tokenizer: Path | None = None
    own: Sequence[RequestSpec] = ()

    def requests(self) -> Iterator[RequestSpec]:
        """`count` of them. Lazy."""
        return itertools.islice(self.endless(), self.count)

    def endless(self) -> Iterator[RequestSpec]:
        """For runs that end by time. Lazy."""
        specs = self._own() if self.own else requests(profile(self.name), self.knobs, words(self.tokenizer))
        return specs if self.arrivals is None else with_arrivals(specs, self.arrivals, self.knobs.seed)

    def endless_of(self, seed: int) -> Iterator[RequestSpec]:
        """Of another seed."""
        return self.seeded(seed).endless()

    def at(self, arrivals: Arrivals) -> Workload:
        """The same requests at other times."""
        return replace(self, arrivals=arrivals)

    def seeded(self, seed: int) -> Workload:
        """Other requests of the same kind. A user's file stays as it is."""
        return replace(self, knobs=replace(self.knobs, seed=seed))

    def _own(self) -> Iterator[RequestSpec]:
        tokens = self.knobs.output_tokens
        for request in repeated(self.own):
            yield request if tokens is None else replace(request, max_tokens=tokens)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All flags of a workload but its name: what it consists of, how many requests, and when they arrive."""
    parser.add_argument("--n", type=int, metavar="N", help="requests (default: the workload's own number)")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other texts, images and arrivals")
    parser.add_argument("--rate", type=float, metavar="R", help="requests a second, Poisson")
    parser.add_argument("--concurrency", type=int, metavar="C", help="a closed loop of so many instead")
    add_content_arguments(parser)


def add_content_arguments(parser: argparse._ActionsContainer) -> None:
    """The flags of what a workload consists of, for commands with an `--n`, a `--seed` and arrivals of their own."""
    parser.add_argument(
        "--reuse", type=float, default=0.0, metavar="R", help="share of images that were seen before (0 to below 1)"
    )
    parser.add_argument(
        "--zipf", type=float, default=1.0, metavar="A", help="how unevenly repeats fall on images (0: evenly)"
    )
    parser.add_argument("--pictures-each", type=int, metavar="N", help="images of each request that has any")
    parser.add_argument("--output-tokens", type=int, metavar="N", help="tokens of each answer (default: 64, mostly)")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="model directory that counts tokens (default: a word is a token)"
    )
    parser.add_argument("--pictures", type=Path, metavar="DIR", help=f"of the workload {OWN!r}: where images lie")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help=f"of the workload {OWN!r}: JSON lines (mm_custom)")
    parser.add_argument(
        "--cache", type=Path, metavar="DIR", help=f"where drawn images are kept (default: {default_cache()})"
    )


def arrivals_of(arguments: argparse.Namespace) -> Arrivals | None:
    """What `--rate` and `--concurrency` of `add_arguments` say; None without them.

    Raises:
        ConfigError: both say when, or one is out of range.
    """
    if arguments.concurrency is not None:
        if arguments.rate is not None:
            raise ConfigError("--concurrency is a closed loop: it has no --rate", param="--concurrency")
        return ClosedLoop(arguments.concurrency)
    return None if arguments.rate is None else Poisson(arguments.rate)


def workload(name: str, arguments: argparse.Namespace, arrivals: Arrivals | None = None) -> Workload:
    """The workload that `--n`, `--seed` and the flags of `add_content_arguments` describe.

    Raises:
        ConfigError: no such workload, a value out of range, flags that do not go together, an unreadable file.
    """
    knobs = Knobs(arguments.seed, arguments.reuse, arguments.zipf, arguments.pictures_each, arguments.output_tokens)
    if arguments.n is not None and arguments.n < 1:
        raise ConfigError(f"--n is {arguments.n}: 1 or more", param="--n")
    if name == OWN:
        return _own(arguments, knobs, arrivals)
    if name.startswith(RECORDED):
        own = recorded(Path(name.removeprefix(RECORDED)).expanduser(), words(arguments.tokenizer))
        return Workload(name, arguments.n or len(own), knobs, arrivals, arguments.tokenizer, own)
    if arguments.pictures is not None or arguments.prompts is not None:
        raise ConfigError(f"--pictures and --prompts belong to the workload {OWN!r}, not to {name!r}", param="NAME")
    return Workload(name, arguments.n or profile(name).count, knobs, arrivals, arguments.tokenizer)


def _own(arguments: argparse.Namespace, knobs: Knobs, arrivals: Arrivals | None) -> Workload:
    if arguments.pictures is None or arguments.prompts is None:
        raise ConfigError(f"the workload {OWN!r} needs --pictures DIR and --prompts FILE", param="--prompts")
    if knobs.reuse or knobs.images:
        raise ConfigError(
            f"--reuse and --pictures-each are for generated workloads ({', '.join(PROFILES)}): the file says which "
            "images come",
            param="--reuse",
        )
    own = read_dataset(arguments.pictures, arguments.prompts, words(arguments.tokenizer))
    return Workload(OWN, arguments.n or len(own), knobs, arrivals, arguments.tokenizer, own)
