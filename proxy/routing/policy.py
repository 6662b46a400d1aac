"""Routing policies by name, and how the items of one request are spread over encoders: pure functions from loads to a
choice, shared with the simulator.

A policy sees the instances that could do one piece of work, with loads in one unit, and picks one. `first-token` is the
default: pending seconds, those of whoever computes on the same device among them. `least-loaded` is EPD-Serve's (§3.4,
least-loaded-first on the status table). What is unfit is sorted out before, by `preferred`.

No item is chosen for alone. Two wishes meet: a key should have one owner that every proxy agrees on, so that equal work
meets in one place (`owners`), and a request's items should be encoded in parallel by cost and by the encoders' speeds
(EPD §3.3.2), by the same seconds (`with_neighbours`). `spread` grants the first within a bound on the second, `calls`
says which items share a call and which call goes first, `place_items` whether one image keeps several encoders busy.
`tests/soak/placement.py` compares it with brute force.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from statistics import median
from types import MappingProxyType
from typing import Protocol, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from epd_serve.instances import IncarnationId
from store.keys import whole_of

SLACK = 1.25
"""By how much an instance may be above the mean load to have what it has cached used."""

MORE = 1.5
"""By how many requests it may be above that: of few requests in flight the loads differ by chance, and what one of them
adds to a step is little beside a prompt's KV sent again."""

SAME_SPEED = 1.25
"""Instances whose measured speeds differ by less than this from the usual one count as equal: measurements are noisy,
and proxies that heard different ones must agree on owners all the same."""

ALIKE = 2.0
"""The same where what is measured depends on more than the instance: on what its neighbours did, and on how long the
prompts were. Who once had the short ones would not be asked again."""

UNMEASURED_RATE = 1000.0
"""Of a kind of instance none of which has done anything yet."""

CALL_TOKENS = 256.0
"""Items share a call up to so much work: some 10 ms of a datacentre device, against about 2 ms of the proxy's CPU time
that a further call costs. With a call for each thumbnail the proxy would be busy before its encoders are."""

TOLERANCE = 1.05
"""By how much a request's items may take longer because they go to their owners."""

STEP = 1.02
"""By how much the bound grows where the items do not fit."""


class Candidate(Struct, frozen=True, array_like=True):
    """An instance as a policy sees it.

    Attributes:
        load: pending work, in the unit of the instance's kind (`proxy/registry/table.py`).
        last_pick: grows with every pick and breaks ties in turn.
        full: its store has no room, so that more work would only wait there.
        rate: load that it gets done per second, lately; 0 while unknown.
        suspended: its circuit is open: to be picked only where nothing else is there.
        neighbours_s: pending seconds of each other instance that computes on the same device, on CPU on the same core;
            infinite for one that decodes, since nobody knows for how long.
        cached: tokens of this work's prompt that it has in its prefix cache (`proxy/registry/prefix_index.py`).
        shared_tokens: of a step, where requests share it (`StageReport`); 0 where they do not. requests: that it has.
    """

    id: str
    incarnation: str
    load: float
    last_pick: int = 0
    full: bool = False
    rate: float = 0.0
    suspended: bool = False
    neighbours_s: tuple[float, ...] = ()
    cached: float = 0.0
    shared_tokens: int = 0
    requests: int = 0

    @property
    def incarnation_id(self) -> IncarnationId:
        return (self.id, self.incarnation)


class Placement(Struct, frozen=True):
    """The piece of work that is to be placed.

    Attributes:
        cost: load that it adds, in the candidates' unit.
        draw: a random number from 0 to 2**32 - 1, the policies' only chance.
    """

    cost: float = 1.0
    draw: int = 0


Policy = Callable[[Sequence[Candidate], Placement], Candidate]
"""One of the candidates, of which there is at least one."""


def least_loaded(candidates: Sequence[Candidate], _: Placement = Placement()) -> Candidate:
    """The one with the least load; of equals, the one whose device is least busy, then whoever was not picked for
    longest."""
    return min(candidates, key=lambda candidate: (candidate.load, sum(candidate.neighbours_s), candidate.last_pick))


def round_robin(candidates: Sequence[Candidate], _: Placement) -> Candidate:
    """Whoever was not picked for longest, whatever its load."""
    return min(candidates, key=lambda candidate: candidate.last_pick)


def power_of_two(candidates: Sequence[Candidate], placement: Placement) -> Candidate:
    """The less loaded of two drawn at random: many proxies with the same stale table do not all run to the same one."""
    count = len(candidates)
    if count == 1:
        return candidates[0]
    first, rest = placement.draw % count, placement.draw // count
    second = (first + 1 + rest % (count - 1)) % count
    return least_loaded((candidates[first], candidates[second]))


def first_token(candidates: Sequence[Candidate], placement: Placement) -> Candidate:
    """The one where this work costs least first-token time (`predicted_s`)."""
    seconds = predictions_s(candidates, placement.cost)
    least_s = min(seconds)
    soonest = [one for one, its_s in zip(candidates, seconds, strict=True) if its_s == least_s]
    return min(soonest, key=lambda candidate: candidate.last_pick)


def predictions_s(candidates: Sequence[Candidate], cost: float) -> list[float]:
    """For each candidate when work of this cost would be done there, less what is done already (`left_of`), and by how
    much that delays its neighbours. A cached prefix is worth the seconds that it takes to compute: where more than that
    is pending, another one is chosen, and has it too from then on."""
    seconds = []
    for candidate, rate in zip(candidates, rates(candidates, ALIKE), strict=True):
        left = left_of(cost, candidate) if candidate.cached else cost
        own_s = (before(candidate.load, left, candidate.shared_tokens, candidate.requests) + left) / rate
        if candidate.neighbours_s:
            own_s += sharing_s(candidate.load / rate, left / rate, candidate.neighbours_s)
        seconds.append(own_s)
    return seconds


def before(load: float, cost: float, shared_tokens: int, requests: int) -> float:
    """What is computed before work of this cost: all that is pending, or, where so many requests share steps, their
    parts of those that it takes."""
    return min(load, max(shared_tokens, requests * cost)) if shared_tokens else load


def left_of(cost: float, candidate: Candidate) -> float:
    """What is left to compute of a prompt of so many tokens where some are cached: something always is."""
    return max(cost - candidate.cached, min(cost, 1.0))


def most_cached(candidates: Sequence[Candidate], placement: Placement) -> Candidate:
    """The one that has most of the prompt cached among those whose load stays within the bound, `SLACK` times the mean
    and `MORE` pieces of such work. Where none has any the least loaded."""
    if not any(candidate.cached for candidate in candidates):
        return least_loaded(candidates)
    mean = (sum(candidate.load for candidate in candidates) + placement.cost) / len(candidates)
    bound = SLACK * mean + MORE * placement.cost
    within = [candidate for candidate in candidates if candidate.load + placement.cost <= bound]
    most = max((candidate.cached for candidate in within), default=0.0)
    return least_loaded([candidate for candidate in within if candidate.cached == most] or candidates)


def with_neighbours(candidates: Sequence[Candidate], cost: float) -> Sequence[Candidate]:
    """The same with what their neighbours cost, for work of about this cost, as load of their own."""
    if not any(candidate.neighbours_s for candidate in candidates):
        return candidates
    seconds, speeds = predictions_s(candidates, cost), rates(candidates, ALIKE)
    return [
        replace(candidate, load=done_s * rate - cost, rate=rate, neighbours_s=())
        for candidate, done_s, rate in zip(candidates, seconds, speeds, strict=True)
    ]


def sharing_s(pending_s: float, work_s: float, neighbours_s: Sequence[float]) -> float:
    """Seconds that it costs to share a device, whose instances take turns: by which neighbours delay this work, which
    comes after what is `pending_s`, and by which it delays what they have pending themselves."""
    if not neighbours_s:
        return 0.0
    done_s = pending_s + work_s
    return sum(2 * min(other_s, done_s) - min(other_s, pending_s) for other_s in neighbours_s)


def rates(candidates: Sequence[Candidate], same: float = SAME_SPEED) -> list[float]:
    """How much load each gets done per second. Unknown speeds count as the usual one, and so do those that differ from
    it by less than a factor of `same`."""
    measured = [candidate.rate for candidate in candidates]
    usual, least = usual_rate(measured), 1 / same
    return [usual if rate <= 0 or least < rate / usual < same else rate for rate in measured]


def usual_rate(measured: Iterable[float], unmeasured: float = UNMEASURED_RATE) -> float:
    """The median of those that are known, which are not 0; `unmeasured` where none is."""
    known = [rate for rate in measured if rate > 0]
    return median(known) if known else unmeasured


POLICIES: Mapping[str, Policy] = MappingProxyType({
    "first-token": first_token,
    "least-loaded": least_loaded,
    "round-robin": round_robin,
    "power-of-two": power_of_two,
})  # fmt: skip


def preferred(candidates: Sequence[Candidate], avoid: Collection[IncarnationId] = ()) -> Sequence[Candidate]:
    """Those most fit to be picked: neither in `avoid` nor suspended, else only suspended, else what is left."""
    ranks = [burden(candidate, avoid) for candidate in candidates]
    least = min(ranks, default=0)
    return [candidate for candidate, rank in zip(candidates, ranks, strict=True) if rank == least]


def burden(candidate: Candidate, avoid: Collection[IncarnationId] = ()) -> int:
    """What speaks against picking it, 0 for nothing: this request failed there (2), its circuit is open (1)."""
    return (2 if avoid and candidate.incarnation_id in avoid else 0) + candidate.suspended


def spread(keys: Sequence[str], costs: Sequence[float], workers: Sequence[Candidate]) -> list[list[int]]:
    """Spread distinct items over workers: each to its owner, unless it would be done too late there.

    The costliest item goes first; each goes to the first in its order of owners who is done with it within a bound, in
    seconds at the workers' speeds. That begins at what no schedule does better than by much,

        max(TOLERANCE x the costliest item where it is done soonest,
            min(SLACK x mean present load + TOLERANCE x mean share of the items,
                the costliest item where it is done soonest + as long as it takes by itself))

    (an owner makes nobody wait for longer than it would take to encode the item twice) and grows until all items fit,
    at last by filling gaps, whoever owns what (multifit: Coffman, Garey and Johnson, 1978). So a single item meets its
    owner unless that one is slow or has more to do than others, and items of a request do not queue behind each other
    while a worker is idle.

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
    evenly_s = (SLACK * sum(loads) + TOLERANCE * sum(costs)) / sum(speeds)
    bound_s = max(TOLERANCE * longest_s, min(evenly_s, longest_s + max(costs, default=0.0) / max(speeds)))

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


class Encodable(Protocol):
    """An item of a request, or a part of one. `tokens`: its cost. `tiles`: into how many parts it can be cut."""

    @property
    def key(self) -> str: ...
    @property
    def tokens(self) -> float: ...
    @property
    def tiles(self) -> int: ...


Piece = TypeVar("Piece", bound=Encodable)


def place_items(
    items: Sequence[Piece],
    encoders: Sequence[Candidate],
    cut: Callable[[Piece, int], Sequence[Piece]],
    device_of: Callable[[str], object],
    most: int,
) -> tuple[list[Piece], Sequence[Candidate], list[list[int]]]:
    """Spread a request's items over encoders. An image of several tiles goes in as many parts as there are idle
    encoders for, of which each gets one.

    Args:
        cut: makes of an item at most so many parts, named by `store.keys.part_keys`, or leaves it as it is.
        device_of: what the encoder of this id computes on: those on one device are one where parts are counted.
        most: parts of an image.

    Returns:
        The items and parts, the encoders as they are compared, and for each of these the indices of what it gets.
    """
    count = min(most, max(item.tiles for item in items), len(encoders))
    if count > 1:
        idle = {device_of(one.id) for one in encoders if not (one.load or any(one.neighbours_s))}
        count = parts_of(count, len(items), len(idle))
    while True:
        placed = [part for item in items for part in cut(item, count)] if count > 1 else list(items)
        costs = [part.tokens for part in placed]
        workers = with_neighbours(encoders, share_of(costs, len(encoders)))
        shares = spread([part.key for part in placed], costs, workers)
        wholes = [[whole_of(placed[index].key) for index in share] for share in shares] if count > 1 else []
        if all(len(set(share)) == len(share) for share in wholes):
            return placed, workers, shares
        count -= 1  # one would get two parts of an image, and process it twice


def parts_of(tiles: int, items: int, idle: int) -> int:
    """In how many parts an image of so many tiles is encoded: as many as there are places with nothing else to do for
    each of the items that its request has encoded. Each part costs the processing of the whole image before it."""
    return max(1, min(tiles, idle // items))


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
