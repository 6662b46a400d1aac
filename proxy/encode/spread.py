"""Which encoder gets which items, to be done soon, and equal items at the same encoder; which share a call, and which
call goes first. Pure.

Two wishes meet. A key should have one owner that every proxy agrees on, so that equal work meets in one place
(`owners`), and a request's items should be encoded in parallel by cost and by the encoders' speeds (EPD §3.3.2;
`schedule`). `spread` grants the first within a bound on the second. `tests/soak/placement.py` compares it with brute
force.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from proxy.routing.policy import SLACK, Candidate, rates

CALL_TOKENS = 256.0
"""Items share a call up to so much work: some 10 ms of a datacentre device, against about 2 ms of the proxy's CPU time
that a further call costs. With a call for each thumbnail the proxy would be busy before its encoders are."""

TOLERANCE = 1.05
"""By how much a request's items may take longer because they go to their owners."""


def spread(keys: Sequence[str], costs: Sequence[float], workers: Sequence[Candidate]) -> tuple[tuple[int, ...], ...]:
    """Spread distinct items over workers: each to its owner, unless it would be done too late there.

    The costliest item goes first. It goes to the first in its order of owners who is done with it within

        bound = max(TOLERANCE x best makespan known, SLACK x mean present load + TOLERANCE x mean share of the items)

    in seconds at the workers' speeds, so a single item meets its owner unless that one is slow or has more to do than
    others, and items of a request do not queue behind each other while a worker is idle. Where that cannot be kept for
    every item, all go as the best schedule says.

    Args:
        keys, costs: of the items; keys differ. workers: their ids, present loads in the unit of the costs, and speeds.

    Returns:
        For each worker the indices of its items, ascending. No worker that got an item is done after the bound.
    """
    assert workers, "no worker to spread over"
    if len(workers) == 1:
        return (tuple(range(len(costs))),)
    loads = [worker.load for worker in workers]
    speeds = rates(workers)
    best = schedule(costs, loads, speeds)
    best_s = makespan_s(best, costs, loads, speeds)
    bound_s = max(TOLERANCE * best_s, (SLACK * sum(loads) + TOLERANCE * sum(costs)) / sum(speeds))
    at = _to_owners(keys, costs, workers, speeds, bound_s)
    if makespan_s(at, costs, loads, speeds) > bound_s:
        at = best
    shares: list[list[int]] = [[] for _ in workers]
    for item, worker in enumerate(at):
        shares[worker].append(item)
    return tuple(map(tuple, shares))


def share_of(costs: Sequence[float], workers: int) -> float:
    """About how much of the items one worker gets: they cannot be cut."""
    return max(max(costs), sum(costs) / workers)


def schedule(costs: Sequence[float], loads: Sequence[float], speeds: Sequence[float]) -> list[int]:
    """Items over workers so that the last one is done early: the costliest first, each to the worker that will be done
    with it first; then items leave the last worker, alone or for another one, as long as that shortens it.

    Args:
        costs: of the items. loads: what the workers have to do before, in the same unit, and speeds: how much of it
            they do per second (positive).

    Returns:
        For each item the index of its worker.
    """
    totals = list(loads)
    at = [0] * len(costs)
    for item in _costliest_first(costs):
        ends_s = [(total + costs[item]) / speed for total, speed in zip(totals, speeds, strict=True)]
        at[item] = ends_s.index(min(ends_s))
        totals[at[item]] += costs[item]
    for _ in costs:
        if not _relieve_last(at, costs, totals, speeds):
            break
    return at


def _relieve_last(at: list[int], costs: Sequence[float], totals: list[float], speeds: Sequence[float]) -> bool:
    """Take an item from the worker that is done last, for one of another worker or for none, where that is best.

    Returns:
        Whether both are done sooner then. Changes `at` and `totals`, which have everything that is placed.
    """
    last = max(set(at), key=lambda worker: totals[worker] / speeds[worker])
    shortest_s = totals[last] / speeds[last]
    step: tuple[int, int | None, int, float] | None = None
    for item in (index for index, worker in enumerate(at) if worker == last):
        for worker in range(len(totals)):
            if worker == last:
                continue
            for other in (None, *(index for index, its in enumerate(at) if its == worker)):
                less = costs[item] - (costs[other] if other is not None else 0.0)
                done_s = max((totals[last] - less) / speeds[last], (totals[worker] + less) / speeds[worker])
                if done_s < shortest_s:
                    shortest_s, step = done_s, (item, other, worker, less)
    if step is None:
        return False
    item, other, worker, less = step
    at[item] = worker
    if other is not None:
        at[other] = last
    totals[last] -= less
    totals[worker] += less
    return True


def makespan_s(at: Sequence[int], costs: Sequence[float], loads: Sequence[float], speeds: Sequence[float]) -> float:
    """When the last worker that got an item is done; 0 without items."""
    totals = list(loads)
    for worker, cost in zip(at, costs, strict=True):
        totals[worker] += cost
    return max((totals[worker] / speeds[worker] for worker in set(at)), default=0.0)


def _costliest_first(costs: Sequence[float]) -> list[int]:
    return sorted(range(len(costs)), key=lambda item: (-costs[item], item))


def _to_owners(
    keys: Sequence[str], costs: Sequence[float], workers: Sequence[Candidate], speeds: Sequence[float], bound_s: float
) -> list[int]:
    """Returns for each item its worker: the first of its owners within the bound, else whoever is done first."""
    totals = [worker.load for worker in workers]
    ids = [worker.id for worker in workers]
    at = [0] * len(keys)

    def done_s(worker: int, cost: float) -> float:
        return (totals[worker] + cost) / speeds[worker]

    for item in _costliest_first(costs):
        order = owners(keys[item], ids)
        within = (worker for worker in order if done_s(worker, costs[item]) <= bound_s)
        soonest = next(within, None)
        at[item] = min(order, key=lambda worker: done_s(worker, costs[item])) if soonest is None else soonest
        totals[at[item]] += costs[item]
    return at


def calls(
    costs: Sequence[float], shares: Sequence[Sequence[int]], *, alone: bool = False
) -> list[tuple[int, tuple[int, ...]]]:
    """The calls that carry the workers' shares: each item alone but for small ones, which go together up to
    `CALL_TOKENS`.

    Args:
        shares: for each worker the indices of its items, ascending (`spread`).
        alone: the small ones too, so that one that fails takes no other with it.

    Returns:
        (worker, its items) in the order in which they are due: the prefill needs the items of a prompt one after the
        other, so the call with the first of them goes out first, wherever it goes.
    """
    parts = [(worker, part) for worker, share in enumerate(shares) for part in _parts(costs, share, alone=alone)]
    return sorted(parts, key=lambda call: call[1][0])


def _parts(costs: Sequence[float], share: Sequence[int], *, alone: bool) -> list[tuple[int, ...]]:
    parts: list[list[int]] = []
    together: list[int] = []
    for index in share:
        if alone or costs[index] >= CALL_TOKENS:
            parts.append([index])
        elif together and sum(costs[other] for other in together) + costs[index] <= CALL_TOKENS:
            together.append(index)
        else:
            together = [index]
            parts.append(together)
    return [tuple(part) for part in parts]


def owners(key: str, ids: Sequence[str]) -> tuple[int, ...]:
    """Indices of `ids`, the owner of `key` first, then those who inherit it (highest random weight).

    Depends on nothing but the names: every proxy agrees without asking, so the single flight of several proxies is one
    flight; a restart changes nothing, and when one of `ids` is gone only its keys move.
    """
    weights = [hashlib.blake2b(f"{name}\0{key}".encode(), digest_size=16).digest() for name in ids]
    return tuple(sorted(range(len(ids)), key=weights.__getitem__, reverse=True))
