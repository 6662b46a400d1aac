"""`python -m tests.soak.placement`: a request's images on several encoders, against brute force (EPD §3.3.2).

Pure: the proxy's own `spread` places seeded sets of images on idle encoders, an image costs its tokens, and the best
of all placements is found by trying them. Emulated in that no encoder runs; what is measured is the placement alone.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.micro.measurement import Goal
from epd_serve.image_tokens import PIXELS_PER_TOKEN
from proxy.routing.policy import Candidate, spread
from tests.soak.harness import Result, Soak

Row = dict[str, Any]
IMAGES, ENCODERS = 8, 4
SETS, QUICK_SETS = 300, 60
SEED = 5
SIZES = ((224, 224), (448, 448), (640, 480), (800, 600), (1280, 720), (1920, 1080), (2560, 1440), (3840, 2160))
"""Mixed resolutions: each image one of these, give or take a tenth of its pixels."""
LARGE, SMALL = (2560, 1440), (448, 448)
LARGE_ONES = {"mixed": 0, "skewed": IMAGES // 2, "two large": 2}
"""Kinds of sets: so many large images among small ones, in random order; `mixed` has any sizes."""
RATES = {"equal": (1.0,) * ENCODERS, "one twice as fast": (1.0, 1.0, 1.0, 2.0), "two generations": (1.0, 1.0, 3.0, 3.0)}
GOALS = (
    Goal("irp_makespan_over_optimum", "<=", 1.1, "the worst of all sets of 8 images on 4 encoders"),
    Goal("irp_makespan_over_optimum_mean", "<=", 1.05, "their mean"),
    Goal("irp_under_equal_count_skewed", ">=", 0.25, "shorter than with equally many images each, mean"),
)


def measure(arguments: argparse.Namespace) -> Result:
    rows = list(placements(QUICK_SETS if arguments.quick else SETS))
    return figures(rows), rows, "emulated: no encoder runs, an image takes as long as it has tokens"


def placements(count: int) -> Iterator[Row]:
    """One row per set and kind of encoders; deterministic."""
    for number, (kind, costs) in enumerate(_sets(count)):
        for encoders, rates in RATES.items():
            row = {"set": number, "kind": kind, "encoders": encoders, "optimum": optimum(costs, rates)}
            dealt = [item % len(rates) for item in range(len(costs))]
            idle = [0.0] * len(rates)
            row["makespan"] = makespan_s(placed(f"set {number}", costs, rates), costs, idle, rates)
            yield row | {"equal_count": makespan_s(dealt, costs, idle, rates)}


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """From rows to figures.

    Returns:
        irp_makespan_over_optimum: worst over all sets and encoders; irp_makespan_over_optimum_mean.
        irp_under_equal_count_<kind>: by how much the makespan is under that of equally many images per encoder, dealt
        in turn; mean over the sets of that kind on equal encoders, 0 to 1.
    """
    over = [row["makespan"] / row["optimum"] for row in rows]
    under = {
        kind: [
            1 - row["makespan"] / row["equal_count"]
            for row in rows
            if (row["kind"], row["encoders"]) == (kind, "equal")
        ]
        for kind in LARGE_ONES
    }
    return {
        "irp_makespan_over_optimum": max(over),
        "irp_makespan_over_optimum_mean": float(np.mean(over)),
        **{f"irp_under_equal_count_{kind.replace(' ', '_')}": float(np.mean(one)) for kind, one in under.items()},
    }


def optimum(costs: Sequence[float], rates: Sequence[float]) -> float:
    """The shortest makespan of all placements on idle encoders, by trying them."""
    totals = _placements(len(costs), len(rates)) @ np.asarray(costs, dtype=float)  # [placement, encoder]
    return float((totals / np.asarray(rates)).max(axis=1).min())


def makespan_s(at: Sequence[int], costs: Sequence[float], loads: Sequence[float], speeds: Sequence[float]) -> float:
    """When the last worker that got an item is done; 0 without items."""
    totals = list(loads)
    for worker, cost in zip(at, costs, strict=True):
        totals[worker] += cost
    return max((totals[worker] / speeds[worker] for worker in set(at)), default=0.0)


@functools.cache
def _placements(items: int, encoders: int) -> NDArray[np.float64]:
    """Which encoder has which item, for every placement: [placement, encoder, item], 1 where it does."""
    every = np.array(list(itertools.product(range(encoders), repeat=items)), dtype=int).reshape(-1, items)
    return np.asarray(every[:, None, :] == np.arange(encoders)[None, :, None], dtype=np.float64)


def placed(name: str, costs: Sequence[float], rates: Sequence[float]) -> list[int]:
    """The encoder that `spread` gives each item."""
    workers = [Candidate(f"E{index}", "1", 0.0, rate=1000 * rate) for index, rate in enumerate(rates)]
    shares = spread([f"{name} image {index}" for index in range(len(costs))], costs, workers)
    at = {item: worker for worker, share in enumerate(shares) for item in share}
    return [at[item] for item in range(len(costs))]


def _sets(count: int) -> Iterator[tuple[str, tuple[float, ...]]]:
    """As many of every kind: (kind, tokens of each image in the order of the prompt)."""
    chance = random.Random(SEED)
    for kind, _ in zip(itertools.cycle(LARGE_ONES), range(count)):
        sizes = [chance.choice(SIZES) for _ in range(IMAGES)]
        if large := LARGE_ONES[kind]:
            sizes = chance.sample([LARGE] * large + [SMALL] * (IMAGES - large), IMAGES)
        pixels = [width * height * chance.uniform(0.9, 1.1) for width, height in sizes]
        yield kind, tuple(each / PIXELS_PER_TOKEN for each in pixels)


SOAK = Soak(
    "placement", "a request's images over several encoders, placement alone", measure, GOALS, kind="emulated: placement"
)

if __name__ == "__main__":
    raise SystemExit(SOAK.main())
