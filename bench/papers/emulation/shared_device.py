"""A device that several stages share: steps that run at the same time slow each other down. Virtual time, pure.

Each step is a mixture of kinds of work. While steps run side by side each goes on at 1 / slowdown of its speed alone,
and when one ends, or another one begins, the others' speeds change. A step alone takes just its time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from bench.papers.emulation.clock import Clock

Mixture = Mapping[str, float]
"""Share of a step's time alone by kind of work; they sum to 1."""
Slowdowns = Mapping[frozenset[str], float]
"""How many times as long both of two kinds of work take while they run side by side."""


def mixture(**seconds: float) -> Mixture:
    """Returns that of a step whose parts take so long. A step that takes no time is no mixture."""
    total_s = sum(seconds.values())
    return {kind: part_s / total_s for kind, part_s in seconds.items() if part_s > 0} if total_s > 0 else {}


def slowdown(own: Mixture, others: Iterable[Mixture], slowdowns: Slowdowns) -> float:
    """How many times as long work of mixture `own` takes beside `others`: what each of them adds, summed."""
    return 1.0 + sum(
        share * other_share * (slowdowns[frozenset((kind, other_kind))] - 1.0)
        for other in others
        for kind, share in own.items()
        for other_kind, other_share in other.items()
    )


@dataclass(eq=False)
class _Step:
    """`left_s`: of its time alone. `speed`: of its speed alone."""

    mixture: Mixture
    left_s: float
    done: Callable[[], None]
    speed: float = 1.0


class SharedDevice:
    """Runs steps and calls back when each is done."""

    def __init__(self, clock: Clock, slowdowns: Slowdowns) -> None:
        self._clock, self._slowdowns = clock, slowdowns
        self._steps: list[_Step] = []
        self._advanced_to_s = 0.0
        self._plan = 0

    def run(self, mixture: Mixture, seconds: float, done: Callable[[], None]) -> None:
        """Begin a step that takes `seconds` alone."""
        self._advance()
        self._steps.append(_Step(mixture, seconds, done))
        self._plan_next_end()

    def _advance(self) -> None:
        passed_s, self._advanced_to_s = self._clock.now_s - self._advanced_to_s, self._clock.now_s
        for step in self._steps:
            step.left_s -= passed_s * step.speed

    def _plan_next_end(self) -> None:
        """Set the speeds from now on; any end that was planned before no longer holds."""
        self._plan += 1
        if not self._steps:
            return
        for step in self._steps:
            others = [other.mixture for other in self._steps if other is not step]
            step.speed = 1.0 / slowdown(step.mixture, others, self._slowdowns)
        first, plan = min(self._steps, key=lambda step: step.left_s / step.speed), self._plan
        self._clock.after(max(0.0, first.left_s / first.speed), lambda: self._end(first, plan))

    def _end(self, step: _Step, plan: int) -> None:
        if plan == self._plan:
            self._advance()
            self._steps.remove(step)
            self._plan_next_end()
            step.done()
