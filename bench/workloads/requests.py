"""What a workload consists of, requests as frozen data, and when they arrive: Poisson, recorded, a closed loop.

Pure and seeded; no bytes are made here, nothing is sent, and whoever sends waits. A workload is a lazy sequence of
`RequestSpec`. It is equal for equal (name, seed, knobs) on every machine; images are references that
`bench/workloads/images.py` turns into bytes. `with_arrivals` puts times on requests. Open arrivals are endless: a run
is cut by its number of requests or by time.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from bench.workloads.distributions import seeded_rng
from epd_serve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ImageRef:
    """An image that is not in memory: rendered from a seed. Equal references have equal bytes, so that a repeated image
    is one and the same reference.

    Attributes:
        width, height: pixels.
        seed: of the drawing.
    """

    width: int
    height: int
    seed: int

    def __post_init__(self) -> None:
        assert self.width > 0 and self.height > 0

    @property
    def key(self) -> str:
        """A name for the image, safe in file names."""
        return hashlib.sha256(f"seed:{self.seed}:{self.width}x{self.height}:jpeg".encode()).hexdigest()[:32]


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


DIGITS = 6
"""Arrivals are rounded to microseconds: whatever the last bit of a machine's logarithm is, they are equal."""


@dataclass(frozen=True)
class Poisson:
    """Independent arrivals, `rate_rps` requests a second on average."""

    rate_rps: float

    def __post_init__(self) -> None:
        if not 0 < self.rate_rps < math.inf:
            raise ConfigError(f"rate is {self.rate_rps:g}: it has to be above 0", param="--rate")

    def gaps(self, seed: int) -> Iterator[float]:
        """Seconds before each request."""
        rng = seeded_rng("arrivals", "poisson", seed)
        while True:
            yield from rng.gamma(1.0, 1 / self.rate_rps, 1024).tolist()


@dataclass(frozen=True)
class Trace:
    """The gaps between recorded arrivals, over and over where a run is longer than the trace.

    Attributes:
        times_s: ascending, at least two, the last one later than the first.
    """

    times_s: Sequence[float]

    def __post_init__(self) -> None:
        if len(self.times_s) < 2 or self.times_s[-1] <= self.times_s[0]:
            raise ConfigError("a trace needs two arrivals or more, at different times", param="--rate")

    def gaps(self, seed: int) -> Iterator[float]:
        """Seconds before each request; the first comes at once. `seed` changes nothing."""
        own = [later - earlier for earlier, later in itertools.pairwise(self.times_s)]
        return itertools.chain([0.0], itertools.cycle(own))


@dataclass(frozen=True)
class ClosedLoop:
    """So many requests under way at any time: the next is sent when one has ended. No arrival times."""

    concurrency: int

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ConfigError(f"concurrency is {self.concurrency}: 1 or more", param="--concurrency")


OpenArrivals = Poisson | Trace
Arrivals = OpenArrivals | ClosedLoop


def arrival_times(arrivals: OpenArrivals, seed: int) -> Iterator[float]:
    """Seconds from the start, ascending, endless."""
    return (round(at, DIGITS) for at in itertools.accumulate(arrivals.gaps(seed)))


def arrivals_within(arrivals: OpenArrivals, seconds: float, seed: int) -> list[float]:
    """All times before `seconds`."""
    return list(itertools.takewhile(lambda at: at < seconds, arrival_times(arrivals, seed)))


def with_arrivals(requests: Iterable[RequestSpec], arrivals: Arrivals, seed: int) -> Iterator[RequestSpec]:
    """The requests, each with its time; without times in a closed loop. Lazy.

    Bursts follow each request's `pace`; a trace has its own and keeps its times.
    """
    if isinstance(arrivals, ClosedLoop):
        for request in requests:
            yield replace(request, arrival_s=None)
        return
    gaps, at = arrivals.gaps(seed), 0.0
    for request in requests:
        at += next(gaps) / (1.0 if isinstance(arrivals, Trace) else request.pace)
        yield replace(request, arrival_s=round(at, DIGITS))
