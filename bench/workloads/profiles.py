"""The workloads by name, as `profiles.yaml` has them: every number of theirs with its source.

A `Fact` is what a source prints, and a sample of the profile has to meet it (tests/bench/workloads/test_profiles.py).
What no source prints is in `chosen`, in words: nobody has to take a guess of ours for a measurement of somebody's.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from bench.workloads.distributions import Numbers, OneSizeOf, Sizes, Traffic
from epd_serve.errors import ConfigError

OUTPUT_TOKENS = 64
"""EPD-Serve §4.1: "the output sequence length is uniformly fixed to 64 tokens in all experiments"."""


class Fact(Struct, frozen=True):
    """A number that a source prints.

    Attributes:
        statistic: as tests/bench/workloads/summary.py names it.
        within: relative tolerance of a sample of the profile's own size; of at-most and at-least facts it is 0.
        sense: `==` within the tolerance, or a bound.
    """

    statistic: str
    value: float
    source: str
    within: float = 0.02
    sense: str = "=="


class Profile(Struct, frozen=True):
    """A workload before it is seeded.

    Attributes:
        source: whose workload it is modelled on.
        text_tokens: of a request with images. text_only_tokens: of one without.
        sizes: of the images.
        traffic: whiles that take turns; one of them alone is a steady workload. The mean of length / pace over a round
            equals the mean length, so that bursts leave the average rate as it was asked for.
        count: requests of a run where nothing else is said.
        chosen: what is not published and therefore our choice.
    """

    name: str
    source: str
    text_tokens: Numbers
    sizes: Sizes | OneSizeOf
    traffic: tuple[Traffic, ...]
    facts: tuple[Fact, ...]
    chosen: str = ""
    text_only_tokens: Numbers | None = None
    max_tokens: int = OUTPUT_TOKENS
    count: int = 512


_FILE = Path(__file__).with_suffix(".yaml")
PROFILES: Mapping[str, Profile] = {one.name: one for one in msgspec.yaml.decode(_FILE.read_bytes(), type=list[Profile])}


def profile(name: str) -> Profile:
    """The profile of that name.

    Raises:
        ConfigError: there is none; it names the nearest.
    """
    if name in PROFILES:
        return PROFILES[name]
    near = difflib.get_close_matches(name, PROFILES, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(PROFILES)}"
    raise ConfigError(f"no workload is called {name!r}: {hint} (epd-bench workload --list shows all)", param="NAME")
