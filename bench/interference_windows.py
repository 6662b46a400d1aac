"""From samples of operators side by side to latencies, slowdowns and the maps of a profile. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.statistic import Spread
from epd_serve.errors import StageError
from npu_ops.interference_profile import InterferenceMap, Shares, Slowdown

LEAST = 3
"""Samples of a process in a window."""

Span = tuple[float, float]
Seats = tuple[tuple[str, float | None], ...]
"""What the processes of a window run, and with what share: one entry, or two."""


@dataclass(frozen=True)
class Found:
    """One process of one window. `latency_s`: of a call, the mean. `beside`: (operator, share), None when alone."""

    turn: int
    seat: int
    operator: str
    share: float | None
    beside: tuple[str, float | None] | None
    latency_s: float
    samples: int


def overlapping(runs: Sequence[Sequence[Span]], begin: float, end: float) -> list[list[Span]]:
    """Of each process the samples that began and ended while all of them ran, and within `begin` to `end`.

    Each had to run from before `begin` until after `end`, so that none has been alone in between.

    Raises:
        StageError: one began late, or finished less than `LEAST` samples.
    """
    for spans in runs:
        if spans[0][0] > begin or spans[-1][1] < end:
            raise StageError(
                "a process came late to its window: the machine is too busy to measure", stage="interference"
            )
    kept = [[span for span in spans if begin <= span[0] and span[1] <= end] for spans in runs]
    if min(map(len, kept)) < LEAST:
        raise StageError(f"fewer than {LEAST} calls in {end - begin:g} s: raise --seconds", stage="interference")
    return kept


def latency_s(spans: Sequence[Span], repeats: int) -> float:
    """Mean seconds of a call. The mean: in turns on one core some calls are spared and others wait for two."""
    return statistics.fmean(ended - begun for begun, ended in spans) / repeats


def windows(names: Sequence[str], shares: Shares | None) -> list[tuple[str, ...]]:
    """What has to be run for one division: (operator,) alone in each process, and pairs, one operator per process.

    With equal shares a pair tells of both orders; with unequal ones it matters who has which.
    """
    equal = shares is None or shares[0] == shares[1]
    pairs = itertools.combinations_with_replacement(names, 2) if equal else itertools.product(names, repeat=2)
    return [*((name,) for name in names), *pairs]


def slowdowns(found: Sequence[Found]) -> list[tuple[Found, float]]:
    """Each run with a neighbour, and its latency over that of the same process alone in the same round."""
    alone = {(one.turn, one.seat, one.operator, one.share): one.latency_s for one in found if one.beside is None}
    return [
        (one, one.latency_s / alone[one.turn, one.seat, one.operator, one.share])
        for one in found
        if one.beside is not None
    ]


def maps(found: Sequence[Found], names: Sequence[str]) -> tuple[InterferenceMap, ...]:
    """One map per division of the cores, unlimited first; its operators in the order of `names`."""
    groups: dict[Shares | None, dict[tuple[str, str], list[tuple[int, float]]]] = {}
    for one, ratio in slowdowns(found):
        assert one.beside is not None
        pairs = groups.setdefault(_division(one), {})
        pairs.setdefault((one.operator, one.beside[0]), []).append((one.turn, ratio))
    made = []
    for division, pairs in sorted(groups.items(), key=lambda item: item[0] or (0.0, 0.0)):
        share = division[0] if division else None
        alone = {
            name: statistics.median(
                one.latency_s for one in found if (one.beside, one.operator, one.share) == (None, name, share)
            )
            for name in names
        }
        listed = tuple(_slowdown(own, beside, pairs[own, beside]) for own in names for beside in names)
        made.append(InterferenceMap(division, alone, listed))
    return tuple(made)


def alike(found: InterferenceMap, needs: Mapping[str, str]) -> dict[str, float]:
    """The mean slowdown of pairs that need the same resource, and of those that do not (EPD-Serve, Fig. 6)."""
    groups: dict[str, list[float]] = {"alike": [], "unlike": []}
    for one in found.slowdowns:
        groups["alike" if needs[one.operator] == needs[one.beside] else "unlike"].append(one.slowdown)
    return {name: statistics.fmean(ratios) for name, ratios in groups.items() if ratios}


def _division(one: Found) -> Shares | None:
    assert one.beside is not None
    if one.share is None or one.beside[1] is None:
        return None
    return one.share, one.beside[1]


def _slowdown(own: str, beside: str, ratios: Sequence[tuple[int, float]]) -> Slowdown:
    """Over rounds; where a round has two (an operator beside itself), their mean."""
    by_turn: dict[int, list[float]] = {}
    for turn, ratio in ratios:
        by_turn.setdefault(turn, []).append(ratio)
    spread = Spread.of([statistics.fmean(one) for one in by_turn.values()])
    median, p25, p75 = (round(value, 4) for value in (spread.median, spread.p25, spread.p75))
    return Slowdown(own, beside, median, p25, p75, len(by_turn))
