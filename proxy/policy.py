"""Routing policies: pure functions from loads to choices, shared with the simulator.

Least-loaded-first as in EPD-Serve's status table. For items to encode, two wishes meet: a key should have one owner
that every proxy agrees on, so that equal work meets in one place (rendezvous hashing, design §4.2), and a request's
items should be spread by cost (longest processing time first, design §4.3). `assign_to_owners` grants the first within
a bound on the second.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

SLACK = 1.25


@dataclass(frozen=True)
class Candidate:
    """An instance as a policy sees it.

    Attributes:
        load: pending work, in the unit of the instance's kind (`proxy/table.py`).
        last_pick: grows with every pick and breaks ties in turn.
        full: its store has no room, so that more work would only wait there.
        rate: load that it gets done per second, lately; 0 while unknown.
        suspended: its circuit is open: to be picked only where nothing else is there.
    """

    id: str
    incarnation: str
    load: float
    last_pick: int = 0
    full: bool = False
    rate: float = 0.0
    suspended: bool = False

    @property
    def life(self) -> tuple[str, str]:
        return (self.id, self.incarnation)


def least_loaded(candidates: Sequence[Candidate], avoid: Collection[tuple[str, str]] = ()) -> Candidate | None:
    """The least loaded candidate, preferring lives that are not in `avoid` and then those that are not suspended;
    None when there is none at all."""
    preferred = [candidate for candidate in candidates if candidate.life not in avoid] or candidates
    preferred = [candidate for candidate in preferred if not candidate.suspended] or preferred
    return min(preferred, key=lambda candidate: (candidate.load, candidate.last_pick), default=None)


def owners(key: str, ids: Sequence[str]) -> tuple[int, ...]:
    """Indices of `ids`, the owner of `key` first, then those who inherit it (highest random weight).

    Depends on nothing but the names: every proxy agrees, a restart changes nothing, and when one of `ids` is gone only
    its keys move.
    """

    def weight(index: int) -> bytes:
        return hashlib.blake2b(f"{ids[index]}\0{key}".encode(), digest_size=16).digest()

    return tuple(sorted(range(len(ids)), key=weight, reverse=True))


def assign_to_owners(
    keys: Sequence[str], weights: Sequence[float], workers: Sequence[Candidate], *, slack: float = SLACK
) -> tuple[tuple[int, ...], ...]:
    """Spread distinct items over workers: each to its owner, unless that one would have too much.

    The heaviest item goes first. It goes to the first in its order of owners whose load stays within

        bound = max(slack x mean load with all items placed, weight of the heaviest item)

    so an idle worker takes any item, and where nobody stays within it to the least loaded (of equals, the first in its
    order). A single item among idle workers thus always meets its owner, and items of a request do not queue behind
    each other while a worker is idle.

    Args:
        keys, weights: of the items; keys differ. workers: their ids and present loads, in the unit of the weights.

    Returns:
        For each worker the indices of its items, ascending. No worker that got an item ends above the larger of the
        bound and the mean plus one item.
    """
    assert workers, "no worker to spread over"
    totals = [worker.load for worker in workers]
    ids = [worker.id for worker in workers]
    bound = max(slack * (sum(totals) + sum(weights)) / len(workers), max(weights, default=0.0))
    shares: list[list[int]] = [[] for _ in workers]
    for item in sorted(range(len(keys)), key=lambda index: (-weights[index], index)):
        order = owners(keys[item], ids)
        within = [worker for worker in order if totals[worker] + weights[item] <= bound]
        chosen = within[0] if within else min(order, key=lambda worker: totals[worker])
        shares[chosen].append(item)
        totals[chosen] += weights[item]
    return tuple(tuple(sorted(share)) for share in shares)
