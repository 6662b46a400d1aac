"""A workload that a command can run: a profile or recorded traffic, with its knobs and its arrivals.

The flags are here, so that every command that loads a server takes the same ones. A run longer than a recording begins
again at its first request.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.workloads.generate import Knobs, requests, words
from bench.workloads.images import default_cache
from bench.workloads.profiles import profile
from bench.workloads.requests import (
    Arrivals,
    ClosedLoop,
    Poisson,
    RequestSpec,
    with_arrivals,
)
from bench.workloads.traffic import recorded
from epd_serve.errors import ConfigError

RECORDED = "recorded:"
"""How a workload of the user's own begins on the command line; a file follows."""


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


@dataclass(frozen=True)
class Workload:
    """Requests that can be asked for as often as one likes: they are the same each time.

    Attributes:
        name: of a profile, or of a recording.
        count: requests of a run.
        arrivals: None leaves requests as they are: without times, or with those of the recording.
        own: what was recorded; empty for a profile.
        sizes_alone: a profile's requests have no contents (`bench/workloads/generate.py`).
    """

    name: str
    count: int
    knobs: Knobs
    arrivals: Arrivals | None = None
    tokenizer: Path | None = None
    own: Sequence[RequestSpec] = ()
    sizes_alone: bool = False

    def requests(self) -> Iterator[RequestSpec]:
        """`count` of them. Lazy."""
        return itertools.islice(self.endless(), self.count)

    def endless(self) -> Iterator[RequestSpec]:
        """For runs that end by time. Lazy."""
        specs = self._own() if self.own else self._drawn()
        return specs if self.arrivals is None else with_arrivals(specs, self.arrivals, self.knobs.seed)

    def endless_of(self, seed: int) -> Iterator[RequestSpec]:
        """Of another seed."""
        return self.seeded(seed).endless()

    def at(self, arrivals: Arrivals) -> Workload:
        """The same requests at other times."""
        return replace(self, arrivals=arrivals)

    def seeded(self, seed: int) -> Workload:
        """Other requests of the same kind. A recording stays as it is."""
        return replace(self, knobs=replace(self.knobs, seed=seed))

    def _drawn(self) -> Iterator[RequestSpec]:
        texts = None if self.sizes_alone else words(self.tokenizer)
        return requests(profile(self.name), self.knobs, texts)

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
    if name.startswith(RECORDED):
        own = recorded(Path(name.removeprefix(RECORDED)).expanduser(), words(arguments.tokenizer))
        return Workload(name, arguments.n or len(own), knobs, arrivals, arguments.tokenizer, own)
    usual = profile(name).count
    return Workload(name, arguments.n or usual, knobs, arrivals, arguments.tokenizer)
