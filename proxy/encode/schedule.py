"""Items over workers of different speeds, so that the last one is done as early as can be. Pure.

Longest processing time first, then a bounded search for something better: with two or three items per worker, as
requests have them, LPT alone is up to a quarter above the optimum. `tests/soak/placement.py` compares it with
brute force.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

GOOD_ENOUGH = 1.02
"""The search ends where nothing can be shorter by more than this factor."""

MAX_SEARCHED = 16
"""Items beyond which LPT is near the optimum by itself."""

MAX_STEPS = 300
"""Bound of the search: about two milliseconds at worst, of which there is hardly ever need."""


@dataclass(frozen=True)
class Schedule:
    """
    Attributes:
        at: for each item the index of its worker.
        makespan_s: when the last worker that got an item is done.
    """

    at: tuple[int, ...]
    makespan_s: float


def schedule(costs: Sequence[float], loads: Sequence[float], speeds: Sequence[float]) -> Schedule:
    """The items spread over workers.

    Args:
        costs: of the items. loads: what the workers have to do before, in the same unit, and speeds: how much of it
            they do per second (positive).
    """
    greedy = longest_first(costs, loads, speeds)
    if len(costs) == 1:
        return greedy
    shortest_s = shortest_possible_s(costs, loads, speeds)
    if len(costs) > MAX_SEARCHED or greedy.makespan_s <= GOOD_ENOUGH * shortest_s:
        return greedy
    search = _Search(costs, loads, speeds, greedy, shortest_s)
    search.place(0, 0.0)
    return search.best


def longest_first(costs: Sequence[float], loads: Sequence[float], speeds: Sequence[float]) -> Schedule:
    """The costliest item first, each to the worker that will be done with it first."""
    totals = list(loads)
    at = [0] * len(costs)
    for item in _by_cost(costs):
        ends_s = [(total + costs[item]) / speed for total, speed in zip(totals, speeds, strict=True)]
        at[item] = ends_s.index(min(ends_s))
        totals[at[item]] += costs[item]
    return Schedule(tuple(at), makespan_s(at, costs, loads, speeds))


def makespan_s(at: Sequence[int], costs: Sequence[float], loads: Sequence[float], speeds: Sequence[float]) -> float:
    """When the last worker that got an item is done; 0 without items."""
    totals = list(loads)
    for worker, cost in zip(at, costs, strict=True):
        totals[worker] += cost
    return max((totals[worker] / speeds[worker] for worker in set(at)), default=0.0)


def shortest_possible_s(costs: Sequence[float], loads: Sequence[float], speeds: Sequence[float]) -> float:
    """No spread is shorter: items could be cut into any pieces, and the costliest is somewhere."""
    work, speed, level_s = sum(costs), 0.0, 0.0
    queues = sorted((load / its_speed, its_speed) for load, its_speed in zip(loads, speeds, strict=True))
    for busy_s, its_speed in queues:
        if speed and busy_s >= level_s:
            break
        work += busy_s * its_speed
        speed += its_speed
        level_s = work / speed
    costliest = max(costs, default=0.0)
    return max(level_s, min((load + costliest) / its for load, its in zip(loads, speeds, strict=True)))


def _by_cost(costs: Sequence[float]) -> list[int]:
    return sorted(range(len(costs)), key=lambda item: (-costs[item], item))


class _Search:
    """Branch and bound in LPT's order, from LPT's result downwards."""

    def __init__(
        self,
        costs: Sequence[float],
        loads: Sequence[float],
        speeds: Sequence[float],
        best: Schedule,
        shortest_s: float,
    ) -> None:
        self.best = best
        self._shortest_s = shortest_s
        self._costs = costs
        self._order = _by_cost(costs)
        self._speeds = speeds
        self._totals = list(loads)
        self._at = [0] * len(costs)
        self._steps = 0

    def place(self, position: int, so_far_s: float) -> None:
        """Place the items from `position` on in every way that may be better than the best one known."""
        self._steps += 1
        if position == len(self._order):
            self.best = Schedule(tuple(self._at), so_far_s)
            return
        item = self._order[position]
        cost, totals = self._costs[item], self._totals
        different: dict[tuple[float, float], tuple[float, int]] = {}  # of many workers few are done soon enough
        for worker, (total, speed) in enumerate(zip(totals, self._speeds, strict=True)):
            done_s = (total + cost) / speed
            if done_s * GOOD_ENOUGH < self.best.makespan_s:
                different.setdefault((total, speed), (done_s, worker))
        for done_s, worker in sorted(different.values()):
            end_s = max(so_far_s, done_s)
            if self._over or end_s * GOOD_ENOUGH >= self.best.makespan_s:
                return
            totals[worker] += cost
            self._at[item] = worker
            self.place(position + 1, end_s)
            totals[worker] -= cost

    @property
    def _over(self) -> bool:
        return self._steps >= MAX_STEPS or self.best.makespan_s <= GOOD_ENOUGH * self._shortest_s
