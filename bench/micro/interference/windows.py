"""From samples of operators side by side to latencies, slowdowns and the maps of a profile. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from bench.micro.interference.operators import Operator, needs
from bench.micro.interference.processes import Span
from bench.micro.measurement import Row
from bench.micro.rows import grouped, median
from bench.statistic import Spread
from deploy.planner.interference import InterferenceMap, InterferenceProfile, ProfiledOperator, Shares, Slowdown
from epd_serve.errors import StageError

Window = tuple[str | None, str | None]
"""What each process runs, or None."""

LEAST = 3
"""Samples of a process in a window."""


def overlapping(runs: Sequence[Sequence[Span]], begin: float, end: float) -> list[list[Span]]:
    """Of each process the samples that began and ended while all of them ran, and within `begin` to `end`.

    Each had to run from before `begin` until after `end`, so that none has been alone in between.

    Raises:
        StageError: one began late, or finished less than `LEAST` samples.
    """
    if any(spans[0][0] > begin or spans[-1][1] < end for spans in runs):
        raise StageError("a process came late to its window: the machine is too busy to measure", stage="interference")
    kept = [[span for span in spans if begin <= span[0] and span[1] <= end] for spans in runs]
    if min(map(len, kept)) < LEAST:
        raise StageError(f"fewer than {LEAST} calls in {end - begin:g} s: raise --seconds", stage="interference")
    return kept


def latency_s(spans: Sequence[Span], repeats: int) -> float:
    """Mean seconds of a call. The mean: in turns on one core some calls are spared and others wait for two."""
    return float(np.mean(np.diff(spans))) / repeats


def windows(names: Sequence[str], shares: Shares | None) -> list[Window]:
    """What has to be run for one division: each operator in each process while the other one idles, and pairs.

    With equal shares a pair tells of both orders; with unequal ones it matters who has which.
    """
    pairs = itertools.combinations_with_replacement(names, 2) if equal(shares) else itertools.product(names, names)
    return [*((name, None) for name in names), *((None, name) for name in names), *pairs]


def equal(shares: Shares | None) -> bool:
    return shares is None or shares[0] == shares[1]


def label(shares: Shares | None) -> str:
    """What a division of the cores is called."""
    return "all cores" if shares is None else f"share {shares[0]:g} beside {shares[1]:g}"


def slowdowns(rows: Sequence[Row]) -> list[Row]:
    """Each run with a neighbour, with its `slowdown` over the same process alone in the same round, and `shares`."""
    key = ("round", "process", "operator", "share")
    alone = {tuple(row[name] for name in key): row["latency_ms"] for row in rows if row["beside"] is None}
    return [
        {
            **row,
            "slowdown": row["latency_ms"] / alone[tuple(row[name] for name in key)],
            "shares": None if row["share"] is None else (row["share"], row["beside_share"]),
        }
        for row in rows
        if row["beside"] is not None
    ]


def maps(rows: Sequence[Row], names: Sequence[str]) -> tuple[InterferenceMap, ...]:
    """One map per division of the cores, unlimited first; its operators in the order of `names`."""
    pairs = grouped(slowdowns(rows), "shares", "operator", "beside")
    alone = grouped((row for row in rows if row["beside"] is None), "share", "operator")
    return tuple(
        InterferenceMap(
            shares,
            {name: median(alone[shares[0] if shares else None, name], "latency_ms") / 1e3 for name in names},
            tuple(_slowdown(own, beside, pairs[shares, own, beside]) for own in names for beside in names),
        )
        for shares in sorted({shares for shares, _, _ in pairs}, key=lambda shares: shares or (0.0, 0.0))
    )


def _slowdown(own: str, beside: str, rows: Sequence[Row]) -> Slowdown:
    """Over rounds; where a round has two (an operator beside itself), their mean."""
    means = [float(np.mean([row["slowdown"] for row in one])) for one in grouped(rows, "round").values()]
    spread = Spread.of(means)
    middle, p25, p75 = (round(one, 4) for one in (spread.median, spread.p25, spread.p75))
    return Slowdown(own, beside, middle, p25, p75, len(means))


def means_by_needs(found: InterferenceMap, bound: Mapping[str, str]) -> dict[str, float]:
    """The mean slowdown of pairs that need the same resource (`alike`), and of the others (EPD-Serve, Fig. 6)."""
    rows = [{"alike": bound[one.operator] == bound[one.beside], "slowdown": one.slowdown} for one in found.slowdowns]
    return {
        "alike" if alike else "unlike": float(np.mean([row["slowdown"] for row in own]))
        for (alike,), own in grouped(rows, "alike").items()
    }


def profile_of(rows: Sequence[Row]) -> InterferenceProfile:
    """What the rows say of the device; the first one names it and its operators. Needs follow from the latencies
    without shares."""
    first, *runs = rows
    every = {one["name"]: Operator(**one) for one in first["operators"]}
    measured = maps(runs, list(every))
    bound = needs(every, measured[0].alone_s)
    listed = tuple(
        ProfiledOperator(one.name, one.stages, one.flops, one.moved_bytes, bound[name]) for name, one in every.items()
    )
    return InterferenceProfile(version=1, device=first["device"], operators=listed, maps=measured)


def intensity(flops_per_byte: float) -> str:
    return f"{flops_per_byte:.{0 if flops_per_byte >= 10 or not flops_per_byte else 2}f}"
