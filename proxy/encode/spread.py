"""Which encoder gets which items, to be done soon, and equal items at the same encoder; which share a call, and which
call goes first. Pure.

Two wishes meet. A key should have one owner that every proxy agrees on, so that equal work meets in one place
(`owners`), and a request's items should be encoded in parallel by cost and by the encoders' speeds (EPD §3.3.2).
`spread` grants the first within a bound on the second. `tests/soak/placement.py` compares it with brute force.
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

STEP = 1.02
"""By how much the bound grows where the items do not fit."""


def spread(keys: Sequence[str], costs: Sequence[float], workers: Sequence[Candidate]) -> list[list[int]]:
    """Spread distinct items over workers: each to its owner, unless it would be done too late there.

    The costliest item goes first; each goes to the first in its order of owners who is done with it within a bound, in
    seconds at the workers' speeds. That begins at what no schedule does better than by much,

        max(TOLERANCE x the costliest item where it is done soonest,
            SLACK x mean present load + TOLERANCE x mean share of the items)

    and grows until all items fit, at last by filling gaps, whoever owns what (multifit: Coffman, Garey and Johnson,
    1978). So a single item meets its owner unless
    that one is slow or has more to do than others, and items of a request do not queue behind each other while a worker
    is idle.

    Args:
        keys, costs: of the items; keys differ.
        workers: at least one; their ids, present loads in the unit of the costs, and speeds.

    Returns:
        For each worker the indices of its items, ascending.
    """
    if len(workers) == 1:
        return [list(range(len(costs)))]
    speeds = rates(workers)
    loads = [worker.load for worker in workers]
    ranks = [owners(key, [worker.id for worker in workers]) for key in keys]
    longest_s = min((load + max(costs, default=0.0)) / speed for load, speed in zip(loads, speeds, strict=True))
    bound_s = max(TOLERANCE * longest_s, (SLACK * sum(loads) + TOLERANCE * sum(costs)) / sum(speeds))

    def fitted(*, tight: bool) -> list[list[int]] | None:
        """Each item at the first of its owners that is done within the bound, or, `tight`, at the one that is done
        last; None where one has none."""
        totals, shares = list(loads), [list[int]() for _ in workers]
        for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
            fit = [one for one in ranks[item] if totals[one] + costs[item] <= bound_s * speeds[one]]
            if not fit:
                return None
            worker = max(fit, key=lambda one: totals[one] / speeds[one]) if tight else fit[0]
            totals[worker] += costs[item]
            shares[worker].append(item)
        return [sorted(share) for share in shares]

    while (shares := fitted(tight=False) or fitted(tight=True)) is None:
        bound_s *= STEP
    return shares


def share_of(costs: Sequence[float], workers: int) -> float:
    """About how much of the items one worker gets: they cannot be cut."""
    return max(max(costs), sum(costs) / workers)


def calls(
    costs: Sequence[float], shares: Sequence[Sequence[int]], *, alone: bool = False
) -> list[tuple[int, list[int]]]:
    """The calls that carry the workers' shares: each item alone but for small ones, which go together up to
    `CALL_TOKENS`.

    Args:
        shares: for each worker the indices of its items, ascending (`spread`).
        alone: the small ones too, so that one that fails takes no other with it.

    Returns:
        (worker, its items) in the order in which they are due: the prefill needs the items of a prompt one after the
        other, so the call with the first of them goes out first, wherever it goes.
    """
    made: list[tuple[int, list[int]]] = []
    for worker, share in enumerate(shares):
        together: list[int] = []
        size = CALL_TOKENS
        for item in share:
            small = costs[item] < CALL_TOKENS and not alone
            if small and size + costs[item] <= CALL_TOKENS:
                together.append(item)
                size += costs[item]
                continue
            made.append((worker, [item]))
            if small:
                together, size = made[-1][1], costs[item]
    return sorted(made, key=lambda call: call[1][0])


def owners(key: str, ids: Sequence[str]) -> list[int]:
    """Indices of `ids`, the owner of `key` first, then those who inherit it (highest random weight).

    Depends on nothing but the names: every proxy agrees without asking, so the single flight of several proxies is one
    flight; a restart changes nothing, and when one of `ids` is gone only its keys move.
    """
    weights = [hashlib.blake2b(f"{name}\0{key}".encode(), digest_size=16).digest() for name in ids]
    return sorted(range(len(ids)), key=weights.__getitem__, reverse=True)
