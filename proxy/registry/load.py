"""What requests hold of each incarnation of each instance, and how loaded that makes it together with its own report.

Counts only ever grow: acquired and released are counted apart, so that a process that shares its counts with others
writes cells of its own, and "since then" is a difference. What follows from counts and reports is pure.

The unit of a weight depends on the kind: item tokens for E, requests for D, prompt tokens for all that prefill (and one
for every running request where those decode, too). This is the global instance status table of EPD-Serve §3.4, whose
least-loaded-first asks for pending work of the right kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from enum import StrEnum
from operator import add
from typing import NamedTuple, Protocol

from epd_serve.instances import IncarnationId, Instance
from epd_serve.roles import Role
from epd_serve.wire import StageReport

PER_UNIT = 1000
"""Weights are counted in thousandths, as integers: sums stay exact however long an incarnation is."""


class Work(StrEnum):
    """Kinds of work that a request asks of an instance."""

    ENCODE = "encode"
    PREFILL = "prefill"
    DECODE = "decode"


class Tally(NamedTuple):
    """Counts of one kind of work on one incarnation since it is known; weights in thousandths of a unit."""

    acquired: int = 0
    released: int = 0
    acquired_weight: int = 0
    released_weight: int = 0

    @property
    def held(self) -> int:
        return self.acquired - self.released

    @property
    def held_weight(self) -> int:
        return self.acquired_weight - self.released_weight


NO_TALLY = Tally()
NOTHING: Mapping[Work, Tally] = dict.fromkeys(Work, NO_TALLY)


def total_of(tallies: Iterable[Tally]) -> Tally:
    """All of them together; of at least one."""
    return Tally(*map(sum, zip(*tallies, strict=True)))


class Ledger:
    """Counts of leases, here those of a proxy that is alone; subclasses count where several processes see it. Called
    from one thread of a process; none of it waits."""

    def __init__(self) -> None:
        self._tallies: dict[IncarnationId, dict[Work, Tally]] = {}
        self._totals: dict[IncarnationId, Tally] = {}  # looked at for each choice

    def acquire(self, incarnation_id: IncarnationId, work: Work, weight: int) -> None:
        """This process has given `incarnation_id` one more piece of `work`; weight >= 0."""
        self._count(incarnation_id, work, Tally(acquired=1, acquired_weight=weight))

    def release(self, incarnation_id: IncarnationId, work: Work, weight: int) -> None:
        """One that this process acquired has ended, with the weight it was acquired with."""
        held = self.tallies(incarnation_id)[work]
        assert held.held > 0 and held.held_weight >= weight, (
            f"released more {work} of {incarnation_id} than was acquired"
        )
        self._count(incarnation_id, work, Tally(released=1, released_weight=weight))

    def tallies(self, incarnation_id: IncarnationId) -> Mapping[Work, Tally]:
        """Returns the counts of all processes that share this ledger; every `Work` is in it. Unknown incarnations have
        held nothing."""
        return self._tallies.get(incarnation_id, NOTHING)

    def total(self, incarnation_id: IncarnationId) -> Tally:
        """Returns the same of all kinds of work together."""
        return self._totals.get(incarnation_id, NO_TALLY)

    def forget(self, incarnation_id: IncarnationId) -> None:
        """Nothing is held of `incarnation_id` any more, by anybody, and this process will not acquire there again."""
        self._tallies.pop(incarnation_id, None)
        self._totals.pop(incarnation_id, None)

    def _count(self, incarnation_id: IncarnationId, work: Work, more: Tally) -> None:
        tallies = self._tallies.setdefault(incarnation_id, dict(NOTHING))
        tallies[work] = Tally(*map(add, tallies[work], more))
        self._totals[incarnation_id] = total_of(tallies.values())


class Lease:
    """One unit of in-flight work on one incarnation, which a context may hold. Released exactly once, whoever calls
    first.

    Args:
        weight: in the unit of the instance's role, >= 0.
    """

    def __init__(self, ledger: Ledger, instance: Instance, work: Work, weight: float) -> None:
        assert weight >= 0, f"a lease weighs {weight}"
        self.instance = instance
        self._ledger = ledger
        self._counted = (instance.incarnation_id, work, round(weight * PER_UNIT))
        self._held = True
        ledger.acquire(*self._counted)

    def release(self) -> None:
        if self._held:
            self._held = False
            self._ledger.release(*self._counted)

    def __enter__(self) -> Instance:
        return self.instance

    def __exit__(self, *_: object) -> None:
        self.release()


class Reported(Protocol):
    """What of a `StageReport` loads are made of; a simulated stage has it without making a report."""

    @property
    def waiting(self) -> int: ...
    @property
    def running(self) -> int: ...
    @property
    def pending_prompt_tokens(self) -> int: ...
    @property
    def pending_item_tokens(self) -> int: ...
    @property
    def prompt_tokens_per_s(self) -> float: ...
    @property
    def item_tokens_per_s(self) -> float: ...


_E, _D = Role.E, Role.D  # looking up a member calls a function before Python 3.12, and this is asked for each choice


def reported_pending(role: Role, report: Reported, *, both_halves: bool = False) -> float:
    """What a report says is pending, in the unit of the role. `both_halves`: a P may have been D and decode yet."""
    if role is _E:
        return report.pending_item_tokens
    if role is _D:
        return report.waiting + report.running
    return report.pending_prompt_tokens + (report.running if role.decodes or both_halves else 0)


def reported_rate(role: Role, report: Reported) -> float:
    """How much of that it gets done per second of busy time; 0 while unknown. Of a D, whose requests end when they
    like, nobody knows."""
    if role is _E:
        return report.item_tokens_per_s
    return 0.0 if role is _D else report.prompt_tokens_per_s


def pending_s(role: Role, load: float, running: int, rate: float) -> float:
    """For how long an instance keeps its device busy; infinite while it decodes, since nobody knows how long that is.

    Args:
        load: pending work. running: requests that it runs. rate: how much of its load it gets done per second.
    """
    if role.decodes and running:
        return math.inf
    return 0.0 if role is _D else load / rate  # KV that arrives at a D takes no turn of its device


def load(role: Role, total: Tally, report: StageReport | None, counted: int, *, both_halves: bool = False) -> float:
    """Pending work of one incarnation.

    Without a report: what is in flight. With one: what it says is pending, and what it cannot contain: whatever was
    acquired since, and requests in flight beyond those that the stage counted (its API server still prepares them: for
    a large image that takes longer than any lag), at the mean weight. Never more than what is in flight is added, so
    nothing is left of leases that have ended.

    Args:
        total: of all kinds of work. report: the last one, if it is fresh.
        counted: weight, in thousandths, acquired in total that may be in the report.
    """
    held, held_weight = total.held, total.held_weight
    if report is None:
        return held_weight / PER_UNIT
    since = total.acquired_weight - counted
    unseen = held_weight * max(0, held - report.waiting - report.running) / held if held else 0.0
    return reported_pending(role, report, both_halves=both_halves) + min(held_weight, max(since, unseen)) / PER_UNIT
