"""`epd-bench mechanism`: what each part of the E→P mechanism gives the time to first token of an image.

EPD-Serve's Table 2 asks what asynchronous prefetching brings to the TTFT; here each part is taken away alone from
(E-P)-D: features fetched on demand instead of on their event, pixels sent to P and D instead of metadata, Mooncake
instead of the arena. The whole mechanism stays up, and each variant takes turns with it, in an order drawn for every
turn, so that both of a pair meet the same machine. One request at a time: what is seen is latency on an idle P, not
what queues hide.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from bench.clients.sender import ask
from bench.micro.measurement import Measurement, Row, Usually, flag, one_of, positive, several, whole
from bench.micro.rows import grouped, median, quartiles, ratios, spread, table_of
from bench.scratch import scratch
from bench.served import served
from bench.workloads.synthetic import demo_body, demo_image
from deploy.mm_store import what_is_missing
from epd_serve.demo.presets import PRESETS, write_preset
from epd_serve.errors import ConfigError

LAYOUT, WHOLE = "(E-P)-D", "event, metadata, arena"


@dataclass(frozen=True)
class Variant:
    """The mechanism without one part: what it does instead, its figure, and the flags that take the part away."""

    name: str
    figure: str
    flags: tuple[str, ...]


VARIANTS = {
    "event": Variant("fetched on demand", "ttft_demand_over_event", ("--feature-prefetch", "demand")),
    "metadata": Variant("pixels to P and D", "ttft_pixels_over_metadata", ("--send-pixels", "always")),
    "arena": Variant("through Mooncake", "ttft_mooncake_over_arena", ("--mm-store", "mooncake")),
}


FLAGS = {
    "--without": flag("parts to take away", tuple(VARIANTS), several(one_of(*VARIANTS))),
    "--preset": flag("the model", "demo", choices=PRESETS),
    "--requests": flag("per target", Usually(30, quick=8), whole()),
    "--warmup": flag("requests per target before measuring", 5, whole(0)),
    "--pause": flag("seconds between requests", 0.5, positive),
    "--size": flag("image width and height in pixels", 224, whole(28)),
}


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """A row per request. Raises ConfigError where Mooncake is missing, StageError for an answer that is not whole."""
    if "arena" in arguments.without and (missing := what_is_missing("cpu", master=True)):
        raise ConfigError(f"--without arena: {missing}, or leave arena out", param="--without")
    images = (demo_image(seed, arguments.size) for seed in itertools.count(1))
    chance = random.Random(0)
    with scratch() as folder:
        model: tuple[str, ...] = ()
        if arguments.preset != "demo":
            write_preset(folder / arguments.preset, arguments.preset)
            model = (str(folder / arguments.preset),)
        with served(LAYOUT, model, name=WHOLE, traced=False) as base:
            for variant in (VARIANTS[name] for name in arguments.without):
                with served(LAYOUT, (*model, *variant.flags), name=variant.name, traced=False) as launch:
                    both = (base, launch)
                    for turn in range(-arguments.warmup, arguments.requests):
                        for one in chance.sample(both, 2):
                            time.sleep(arguments.pause)  # the remains of the request before end
                            record = ask(one.url, demo_body(one.model, next(images)))
                            if turn >= 0:
                                ttft_ms = round((record.ttft_s or 0.0) * 1e3, 3)
                                yield {"compared": variant.name, "target": one.name, "turn": turn, "ttft_ms": ttft_ms}


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """A ratio per variant, turn by turn, and both medians."""
    pairs = grouped((row for row in rows if "target" in row), "compared", "target")
    found: dict[str, float] = {}
    for variant in VARIANTS.values():
        without, with_all = (pairs.get((variant.name, name)) for name in (variant.name, WHOLE))
        if without and with_all:
            ratio = ratios(without, with_all, "ttft_ms", "turn")
            found |= quartiles(variant.figure, ratio, 15) if ratio else {}
            found[f"{variant.figure}/without_ms"] = median(without, "ttft_ms")
            found[f"{variant.figure}/whole_ms"] = median(with_all, "ttft_ms")
    return found


def tables(rows: Sequence[Row]) -> Iterable[str]:
    by = grouped((row for row in rows if "target" in row), "compared", "target")
    yield table_of(
        [
            {
                "name": name,
                "of": spread(by[name, name], "ttft_ms"),
                "over": spread(by[name, WHOLE], "ttft_ms"),
                "ratio": ratios(by[name, name], by[name, WHOLE], "ttft_ms", "turn"),
            }
            for name in dict.fromkeys(compared for compared, _ in by)
        ],
        {
            "without": "{name}",
            "TTFT ms": "{of:.1f}",
            "whole mechanism ms": "{over:.1f}",
            "ratio of pairs": "{ratio:.2f}",
        },
    )


def about(arguments: argparse.Namespace) -> dict[str, str]:
    return {"kind": f"real: CPU, {arguments.preset} model"}


MEASUREMENT = Measurement(
    quick="8 requests per target",
    flags=FLAGS,
    about=about,
    measure=measure,
    figures=figures,
    tables=tables,
)
add_arguments = MEASUREMENT.add_arguments
