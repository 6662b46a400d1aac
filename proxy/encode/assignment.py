"""Which encoder gets which items, to be done soon, and equal items at the same encoder; which share a call, and which
call goes first. Pure.

Two wishes meet. A key should have one owner that every proxy agrees on, so that equal work meets in one place
(`owners`), and a request's items should be encoded in parallel by cost and by the encoders' speeds (EPD §3.3.2;
`proxy/encode/schedule.py`). `spread` grants the first within a bound on the second.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from proxy.encode.schedule import makespan_s, schedule
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
    bound_s = max(TOLERANCE * best.makespan_s, (SLACK * sum(loads) + TOLERANCE * sum(costs)) / sum(speeds))
    at = _to_owners(keys, costs, workers, speeds, bound_s)
    if makespan_s(at, costs, loads, speeds) > bound_s:
        at = list(best.at)
    shares: list[list[int]] = [[] for _ in workers]
    for item, worker in enumerate(at):
        shares[worker].append(item)
    return tuple(map(tuple, shares))


def share_of(costs: Sequence[float], workers: int) -> float:
    """About how much of the items one worker gets: they cannot be cut."""
    return max(max(costs), sum(costs) / workers)


def _to_owners(
    keys: Sequence[str], costs: Sequence[float], workers: Sequence[Candidate], speeds: Sequence[float], bound_s: float
) -> list[int]:
    """Returns for each item its worker: the first of its owners within the bound, else whoever is done first."""
    totals = [worker.load for worker in workers]
    ids = [worker.id for worker in workers]
    at = [0] * len(keys)

    def done_s(worker: int, cost: float) -> float:
        return (totals[worker] + cost) / speeds[worker]

    for item in sorted(range(len(keys)), key=lambda index: (-costs[index], index)):
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
