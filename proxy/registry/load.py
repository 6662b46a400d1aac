"""How loaded an instance is: its own word about what is pending, and what it cannot know of yet. Pure.

The unit depends on the kind: item tokens for E, requests for D, prompt tokens for all that prefill (and one for every
running request where those decode, too). Leases carry weights in the same unit. This is the global instance status
table of EPD-Serve §3.4, whose least-loaded-first asks for pending work of the right kind.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Protocol

from epd_serve.roles import Role
from epd_serve.wire import StageReport
from proxy.registry.ledger import PER_UNIT, Tally

REPORT_LAG_S = 0.05
"""A request reaches a stage's scheduler, and its report this proxy, some time after it was acquired: what was acquired
so shortly before a report is taken not to be in it."""

STEP_S = 0.005
"""How finely `Acquired` remembers time."""


class Acquired:
    """How much had been acquired of one incarnation a short time ago. Remembers `REPORT_LAG_S` and little more."""

    def __init__(self) -> None:
        self._samples: deque[tuple[int, int]] = deque([(-1, 0)])  # (steps since the epoch of the clock, total weight)

    def note(self, now: float, total: int) -> None:
        """The total is this now. Times do not go backwards."""
        step = int(now / STEP_S)
        if self._samples[-1][0] == step:
            self._samples[-1] = (step, total)
        else:
            self._samples.append((step, total))
        oldest_step = int((now - REPORT_LAG_S) / STEP_S)
        while len(self._samples) > 1 and self._samples[1][0] < oldest_step:
            self._samples.popleft()

    def before(self, now: float) -> int:
        """The total at `REPORT_LAG_S` before `now`, or a moment earlier."""
        then = int((now - REPORT_LAG_S) / STEP_S)
        return next((total for step, total in reversed(self._samples) if step < then), self._samples[0][1])


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
        counted: weight, in thousandths, acquired in total when the report was made.
    """
    held, held_weight = total.held, total.held_weight
    if report is None:
        return held_weight / PER_UNIT
    since = total.acquired_weight - counted
    unseen = held_weight * max(0, held - report.waiting - report.running) / held if held else 0.0
    return reported_pending(role, report, both_halves=both_halves) + min(held_weight, max(since, unseen)) / PER_UNIT
