"""What became of a move that is done: whether what is new works, and how busy whom it relieves still is. Pure.

A change that did nothing also returns quickly, and one that did what it says may not help.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean, median

from deploy.change.types import Kind
from deploy.follow.moves import busiest, counts_of
from deploy.follow.types import Decision, Needs, Observation, by_group
from epd_serve.layout_parser import parse
from epd_serve.roles import Role

SETTLED_S, MEASURED_S = 5.0, 30.0
"""From the end of a change on: what is seen before is not of it yet, and what is seen until then counts."""
LEAST_LOOKS = 3
PROOF_S = 10.0
ENOUGH = 5
"""Requests of its kind for each instance that could take them: who gets none of so many gets none at all."""
MEDIA: Kind = "media"


@dataclass(frozen=True)
class Gain:
    """How busy a group is after a move, as a share of its time, at the load that came then.

    Attributes:
        what: as of the move. group: that it relieved; after a relayout, the busiest one.
        predicted: by what a request took of the group when the move was decided.
    """

    what: str
    group: str
    predicted: float
    measured: float


def errors_of(gains: Iterable[Gain]) -> list[float]:
    """Of the predictions, relative to what was measured, if that was anything."""
    return [abs(one.predicted - one.measured) / one.measured for one in gains if one.measured]


def median_error(gains: Iterable[Gain]) -> float | None:
    """None where nothing was measured."""
    errors = errors_of(gains)
    return median(errors) if errors else None


@dataclass(frozen=True)
class Working:
    """An instance. given: grows by the work that it is given. up: it is given some."""

    role: Role
    given: float
    up: bool = True


@dataclass
class Outcome:
    """Of one move.

    Args:
        decision: that it was chosen in. done_s: when the change was done.
        new: instances that were started or flipped for it, with their roles.
        before: all instances at that time.
    """

    decision: Decision
    done_s: float
    new: Mapping[str, Role] = field(default_factory=dict)
    before: Mapping[str, Working] = field(default_factory=dict)

    def __post_init__(self) -> None:
        move = self.decision.chosen
        assert move is not None
        self._what, self._layout = move.what, parse(move.layout)
        self._group = move.relieves
        self._costs: Mapping[Kind, Needs] = self.decision.costs
        self._waited: float | None = None  # group-seconds a second: all that waited at first, done by the last look
        self._looks: list[tuple[float, float]] = []
        self._came = dict[Kind, float]()
        self._looked_s = self.done_s

    def look(self, seen: Observation, use: float) -> bool:
        """Take in what is seen now. Returns whether it is still of this move alone."""
        if seen.layout != self._layout:
            return False
        for kind, count in seen.came.items():
            since_s = seen.at_s - self._looked_s
            self._came[kind] = self._came.get(kind, 0.0) + count / seen.window_s * since_s
        self._looked_s = seen.at_s
        counts = counts_of(self._layout)
        rates = {kind: count / seen.window_s for kind, count in seen.came.items()}
        if not self._looks and self._group not in counts:  # of other groups only the profile could say it
            self._costs = seen.costs
            self._group, _ = busiest(_need(seen.costs, rates), counts, use)
        if self._waited is None:
            self._waited = by_group(seen.backlog).get(self._group, 0.0) / MEASURED_S
        if seen.at_s >= self.done_s + SETTLED_S:
            need = _need(self._costs, rates).get(self._group, 0.0) + self._waited
            copies = counts[self._group]
            self._looks.append((min(1.0, need / copies), by_group(seen.busy).get(self._group, 0.0) / copies))
        return True

    def gain(self) -> Gain | None:
        """None before it can be told."""
        if self._looked_s < self.done_s + MEASURED_S or len(self._looks) < LEAST_LOOKS:
            return None
        predicted, measured = (fmean(values) for values in zip(*self._looks, strict=True))
        return Gain(self._what, self._group, predicted, measured)

    def trouble(self, now: Mapping[str, Working]) -> str | None:
        """Why the change did nothing; "" where what is new works; None before that can be told.

        Args:
            now: all instances that run. Whoever of the new ones does not has died, which is no fault of the move.
        """
        if self._looked_s < self.done_s + PROOF_S:
            return None
        for name, role in self.new.items():
            if name not in now:
                continue
            if now[name].role is not role:
                return f"{name} serves as {now[name].role.value}, not as {role.value}"
            if not now[name].up:
                return f"{name} runs, but no front door gives it anything"
            peers = [peer for peer, one in now.items() if one.role is role]
            came = self._came.get(MEDIA, 0.0) if role is Role.E else sum(self._came.values())
            if came < ENOUGH * len(peers) or not any(self._worked(peer, now) for peer in peers):
                return None
            if not self._worked(name, now):
                return f"{name} was given nothing while {came:.0f} requests came for {len(peers)} {role.value}"
        return ""

    def _worked(self, name: str, now: Mapping[str, Working]) -> bool:
        return now[name].given != (self.before[name].given if name in self.before else 0.0)


def _need(costs: Mapping[Kind, Needs], rates: Mapping[Kind, float]) -> Needs:
    """Group-seconds a second, by group."""
    need = dict[str, float]()
    for kind, rate in rates.items():
        for part, cost in costs.get(kind, {}).items():
            need[part] = need.get(part, 0.0) + rate * cost
    return by_group(need)
