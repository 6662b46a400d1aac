"""The measuring of `epd-bench ablations`: a baseline and a variant up together, the same requests to both in turns.

Each round has new requests, since those of the round before would be served from the stores; both have them at the same
times, one after the other, in an order that is drawn for each round.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from bench.ablations.table2 import Asked
from bench.client.bodies import prepared
from bench.client.measure import Plan, measure
from bench.client.row import Row
from bench.client.source import Source
from bench.client.target import Target
from bench.workloads.arrivals import Poisson
from deploy import event_loop
from epd_serve.errors import StageError

_WARM_UP = 1_000_000
"""Beyond the numbers of runs."""


@dataclass(frozen=True)
class Rounds:
    """How much is asked. `plan`: of one run, but for its rate and seed."""

    plan: Plan
    rates: Sequence[float]
    count: int


def in_turns(urls: tuple[str, str], variant: str, source: Source, rounds: Rounds, *, first: int = 0) -> Iterator[Asked]:
    """The requests of all rounds, as soon as both have had a rate's.

    Args:
        urls: of the baseline and of the variant.
        first: number of the first run. None may have been another variant's: the baseline has kept what it had then.

    Raises:
        StageError: one of them went away.
    """
    number = first
    for turn in range(rounds.count):
        for rate in rounds.rates:
            plan = replace(rounds.plan, arrivals=Poisson(rate), seed=rounds.plan.seed + number)
            order = random.Random(f"{variant} {number}").sample((0, 1), 2)
            sides: dict[int, dict[int, Row]] = {}
            for side in order:
                sides[side] = {row.n: row for row in _sent(urls[side], source, plan, number)}
            yield from _paired(variant, rate, turn, sides[0], sides[1])
            number += 1


def warm_up(urls: tuple[str, str], source: Source, plan: Plan, count: int = 8, *, first: int = 0) -> None:
    """So many requests to each, which count nothing: kernels, connections, first-time imports."""
    number = _WARM_UP + first
    for url in urls:
        _sent(url, source, replace(plan, arrivals=Poisson(1.0), count=count, seconds=None, seed=number), number)


def _sent(url: str, source: Source, plan: Plan, number: int) -> list[Row]:
    requests = source.of_run(plan, number)
    if not requests.dues:
        return []
    with prepared(requests.bodies) as asks:
        measured = event_loop.run(measure(Target(url), asks, plan, label=str(number), dues=requests.dues))
    if measured.run.stopped:
        raise StageError(measured.run.stopped, stage=url)
    return measured.run.rows


def _paired(variant: str, rate: float, turn: int, base: dict[int, Row], other: dict[int, Row]) -> Iterator[Asked]:
    for n in sorted(base.keys() & other.keys()):
        rows = base[n], other[n]
        ttft = tuple(_ms(row.ttft_s) if row.ok else None for row in rows)
        tpot = tuple(_ms(row.tpot_s) if row.ok else None for row in rows)
        yield Asked(variant, rate, turn, n, (ttft[0], ttft[1]), (tpot[0], tpot[1]))


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)
