"""Routing policies by name: pure functions from loads to a choice, shared with the simulator.

A policy sees the instances that could do one piece of work, with loads in one unit, and picks one. `least-loaded` is
EPD-Serve's (§3.4, least-loaded-first on the status table). What is unfit is sorted out before, by `preferred`. How the
items of one request are spread over encoders is `proxy/encode/assignment.py`'s business, since no item is chosen for
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

from msgspec import Struct

from epd_serve.instances import IncarnationId
from proxy.routing.rendezvous import owners

SLACK = 1.25
"""By how much the owner of a key may be above the mean load before the key goes elsewhere."""


class Candidate(Struct, frozen=True):
    """An instance as a policy sees it.

    Attributes:
        load: pending work, in the unit of the instance's kind (`proxy/registry/table.py`).
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
    def incarnation_id(self) -> IncarnationId:
        return (self.id, self.incarnation)


class Placement(Struct, frozen=True):
    """The piece of work that is to be placed.

    Attributes:
        cost: load that it adds, in the candidates' unit.
        affinity: equal for work that profits from meeting (`proxy/routing/prompt_affinity.py`); "" for none.
        draw: a random number from 0 to 2**32 - 1, the policies' only chance.
    """

    cost: float = 1.0
    affinity: str = ""
    draw: int = 0


Policy = Callable[[Sequence[Candidate], Placement], Candidate]
"""One of the candidates, of which there is at least one."""


def least_loaded(candidates: Sequence[Candidate], _: Placement = Placement()) -> Candidate:
    """The one with the least load; of equals, whoever was not picked for longest."""
    return min(candidates, key=lambda candidate: (candidate.load, candidate.last_pick))


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


def cache_affine(candidates: Sequence[Candidate], placement: Placement) -> Candidate:
    """The owner of the affinity, or the first of those who inherit it whose load stays within the bound (consistent
    hashing with bounded loads): `SLACK` times the mean with this work placed, or just this work. Without an affinity
    the least loaded."""
    if not placement.affinity:
        return least_loaded(candidates)
    mean = (sum(candidate.load for candidate in candidates) + placement.cost) / len(candidates)
    bound = max(SLACK * mean, placement.cost)
    for index in owners(placement.affinity, [candidate.id for candidate in candidates]):
        if candidates[index].load + placement.cost <= bound:
            return candidates[index]
    return least_loaded(candidates)


def least_predicted(candidates: Sequence[Candidate], placement: Placement) -> Candidate:
    """The one that will be done with this work first, by load and measured speed. An unknown speed counts as the mean
    of the known ones: who is new gets work, and with it a speed."""
    known_rates = [candidate.rate for candidate in candidates if candidate.rate > 0]
    usual = sum(known_rates) / len(known_rates) if known_rates else 1.0

    def predicted_s(candidate: Candidate) -> float:
        return (candidate.load + placement.cost) / (candidate.rate or usual)

    return min(candidates, key=lambda candidate: (predicted_s(candidate), candidate.last_pick))


POLICIES: Mapping[str, Policy] = MappingProxyType({
    "least-loaded": least_loaded,
    "round-robin": round_robin,
    "power-of-two": power_of_two,
    "cache-affine": cache_affine,
    "slo": least_predicted,
})  # fmt: skip


def preferred(candidates: Sequence[Candidate], avoid: Collection[IncarnationId] = ()) -> Sequence[Candidate]:
    """Those most fit to be picked: neither in `avoid` nor suspended, else only suspended, else what is left."""
    ranks = [burden(candidate, avoid) for candidate in candidates]
    least = min(ranks, default=0)
    return [candidate for candidate, rank in zip(candidates, ranks, strict=True) if rank == least]


def burden(candidate: Candidate, avoid: Collection[IncarnationId] = ()) -> int:
    """What speaks against picking it, 0 for nothing: this request failed there (2), its circuit is open (1)."""
    return 2 * (candidate.incarnation_id in avoid) + candidate.suspended
