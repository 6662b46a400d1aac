"""Intra-request parallel encode (EPD §3.3.2): how long a request's items take on several encoders, against brute force.

Pure: the proxy's own `spread` places seeded sets of pictures on idle encoders, a picture costs its tokens, and the best
of all placements is found by trying them. Emulated in that no encoder runs; what is measured is the placement alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from bench.goals import Goal
from bench.proxy_part import Found, Options, Part
from proxy.encode.assignment import spread
from proxy.encode.schedule import makespan_s
from proxy.routing.policy import Candidate
from proxy.stages.cost import PIXELS_PER_TOKEN

PICTURES = 8
ENCODERS = 4
SETS = 300
QUICK_SETS = 60
SEED = 5
SIZES = ((224, 224), (448, 448), (640, 480), (800, 600), (1280, 720), (1920, 1080), (2560, 1440), (3840, 2160))
"""Mixed resolutions: each picture one of these, give or take a tenth of its pixels."""
LARGE, SMALL = (2560, 1440), (448, 448)
LARGE_ONES = {"skewed": PICTURES // 2, "two large": 2}
"""Kinds of sets besides `mixed`: so many large pictures among small ones, in random order."""
RATES = {"equal": (1.0,) * ENCODERS, "one twice as fast": (1.0, 1.0, 1.0, 2.0), "two generations": (1.0, 1.0, 3.0, 3.0)}
GOALS = (
    Goal("irp_makespan_over_optimum", "<=", 1.1, "issue: the worst of all sets of 8 mixed pictures on 4 encoders"),
    Goal("irp_under_equal_count_skewed", ">=", 0.25, "issue: shorter than with equally many pictures each, mean"),
)


@dataclass(frozen=True)
class PictureSet:
    """`costs`: tokens of each picture, in the order of the prompt. `kind`: `mixed` or one of `LARGE_ONES`."""

    kind: str
    costs: tuple[float, ...]


def irp_figures(*, quick: bool = False, rows: list[dict[str, Any]] | None = None) -> dict[str, float]:
    """The figures of intra-request parallel encode; deterministic.

    Args:
        quick: fewer sets. rows: takes one row per set and kind of encoders.

    Returns:
        irp_makespan_over_optimum: worst over all sets and encoders; irp_makespan_over_optimum_mean.
        irp_under_equal_count_<kind>: by how much the makespan is under that of equally many pictures per encoder, dealt
        in turn; mean over the sets of that kind on equal encoders, 0 to 1.
    """
    rows = [] if rows is None else rows
    for number, one in enumerate(_sets(QUICK_SETS if quick else SETS)):
        for encoders, rates in RATES.items():
            rows.append({"set": number, "kind": one.kind, "encoders": encoders, **_measured(number, one, rates)})
    over = [row["makespan"] / row["optimum"] for row in rows]
    on_equal = [row for row in rows if row["encoders"] == "equal"]

    def under(kind: str) -> float:
        return fmean(1 - row["makespan"] / row["equal_count"] for row in on_equal if row["kind"] == kind)

    return {
        "irp_makespan_over_optimum": max(over),
        "irp_makespan_over_optimum_mean": fmean(over),
        **{f"irp_under_equal_count_{kind.replace(' ', '_')}": under(kind) for kind in ("mixed", *LARGE_ONES)},
    }


def optimum(costs: Sequence[float], rates: Sequence[float]) -> float:
    """The shortest makespan of all placements on idle encoders, by trying them. `costs` longest first are quickest."""
    best, totals = float("inf"), [0.0] * len(rates)

    def place(item: int, so_far: float) -> None:
        nonlocal best
        if item == len(costs):
            best = so_far
            return
        tried = set()
        for worker, rate in enumerate(rates):
            if (totals[worker], rate) in tried:  # as good as one that was tried
                continue
            tried.add((totals[worker], rate))
            end = max(so_far, (totals[worker] + costs[item]) / rate)
            if end < best:
                totals[worker] += costs[item]
                place(item + 1, end)
                totals[worker] -= costs[item]

    place(0, 0.0)
    return best


def _measured(number: int, one: PictureSet, rates: Sequence[float]) -> dict[str, float]:
    idle = [0.0] * len(rates)
    workers = [Candidate(f"E{index}", "1", 0.0, rate=1000 * rate) for index, rate in enumerate(rates)]
    keys = [f"set {number} picture {index}" for index in range(len(one.costs))]
    at = [0] * len(keys)
    for worker, share in enumerate(spread(keys, one.costs, workers)):
        for item in share:
            at[item] = worker
    dealt = [item % len(rates) for item in range(len(keys))]
    return {
        "makespan": makespan_s(at, one.costs, idle, rates),
        "optimum": optimum(sorted(one.costs, reverse=True), rates),
        "equal_count": makespan_s(dealt, one.costs, idle, rates),
    }


def _sets(count: int) -> Iterator[PictureSet]:
    """As many of every kind."""
    chance = random.Random(SEED)
    for number in range(count):
        kind = ("mixed", *LARGE_ONES)[number % (1 + len(LARGE_ONES))]
        if kind in LARGE_ONES:
            sizes = [LARGE] * LARGE_ONES[kind] + [SMALL] * (PICTURES - LARGE_ONES[kind])
            chance.shuffle(sizes)
        else:
            sizes = [chance.choice(SIZES) for _ in range(PICTURES)]
        pixels = [width * height * chance.uniform(0.9, 1.1) for width, height in sizes]
        yield PictureSet(kind, tuple(each / PIXELS_PER_TOKEN for each in pixels))


def measure(options: Options) -> Found:
    """The part `irp` of `epd-bench proxy`."""
    rows: list[dict[str, Any]] = []
    figures = irp_figures(quick=options.quick, rows=rows)
    return Found(figures, rows, "emulated: no encoder runs, a picture takes as long as it has tokens")


PART = Part("irp", "a request's pictures over several encoders, placement alone", measure, GOALS)
