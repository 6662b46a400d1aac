"""Routing policies: pure functions from loads to choices, shared with the simulator.

Least-loaded-first as in EPD-Serve's status table; longest-processing-time-first for a request's items (design §4.3).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """An instance as a policy sees it. `last_pick` grows with every pick and breaks ties in turn."""

    id: str
    incarnation: str
    load: float
    last_pick: int = 0

    @property
    def life(self) -> tuple[str, str]:
        return (self.id, self.incarnation)


def least_loaded(candidates: Sequence[Candidate], avoid: Collection[tuple[str, str]] = ()) -> Candidate | None:
    """The least loaded candidate, preferring lives that are not in `avoid`; None when there is none at all."""
    preferred = [candidate for candidate in candidates if candidate.life not in avoid] or candidates
    return min(preferred, key=lambda candidate: (candidate.load, candidate.last_pick), default=None)


def split_longest_first(weights: Sequence[float], loads: Sequence[float]) -> tuple[tuple[int, ...], ...]:
    """Spread items over workers by longest processing time first.

    Args:
        weights: cost of each item. loads: what each worker has already, same unit; at least one worker.

    Returns:
        For each worker the indices of its items, ascending. The largest load exceeds the best possible by at most
        one item's weight (Graham 1969).
    """
    assert loads, "no worker to split over"
    totals = list(loads)
    shares: list[list[int]] = [[] for _ in loads]
    for item in sorted(range(len(weights)), key=lambda index: (-weights[index], index)):
        worker = min(range(len(totals)), key=lambda index: (totals[index], index))
        shares[worker].append(item)
        totals[worker] += weights[item]
    return tuple(tuple(sorted(share)) for share in shares)
