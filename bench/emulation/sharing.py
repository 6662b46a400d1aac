"""A device that several stages share: steps that run at the same time slow each other down. Virtual time, pure.

Each step is a mixture of kinds of work. While steps run side by side each goes on at 1 / slowdown of its speed alone,
and when one ends, or another one begins, the others' speeds change. A step alone takes just its time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from bench.emulation.clock import Clock

Mixture = Mapping[str, float]
"""Share of a step's time alone by kind of work; they sum to 1."""
Slows = Mapping[frozenset[str], float]
"""How many times as long both of two kinds of work take while they run side by side."""


def mixture(**seconds: float) -> Mixture:
    """Of a step whose parts take so long. A step that takes no time is no mixture."""
    whole = sum(seconds.values())
    return {kind: part / whole for kind, part in seconds.items() if part > 0} if whole > 0 else {}


def slowdown(own: Mixture, others: Iterable[Mixture], slows: Slows) -> float:
    """How many times as long work of mixture `own` takes beside `others`: what each of them adds, summed."""
    return 1.0 + sum(
        share * other_share * (slows[frozenset((kind, other_kind))] - 1.0)
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
    """Runs steps; each says when it is done."""

    def __init__(self, clock: Clock, slows: Slows) -> None:
        self._clock, self._slows = clock, slows
        self._steps: list[_Step] = []
        self._settled_s = 0.0
        self._turn = 0
        self.busy_s = 0.0

    def run(self, mixture: Mixture, seconds: float, done: Callable[[], None]) -> None:
        """A step that takes `seconds` alone."""
        self._settle()
        self._steps.append(_Step(mixture, seconds, done))
        self._plan()

    def _settle(self) -> None:
        passed_s, self._settled_s = self._clock.now_s - self._settled_s, self._clock.now_s
        for step in self._steps:
            step.left_s -= passed_s * step.speed
        if self._steps:
            self.busy_s += passed_s

    def _plan(self) -> None:
        """Speeds from now on, and when the first one will be done."""
        self._turn += 1
        if not self._steps:
            return
        for step in self._steps:
            others = [other.mixture for other in self._steps if other is not step]
            step.speed = 1.0 / slowdown(step.mixture, others, self._slows)
        first = min(self._steps, key=lambda step: step.left_s / step.speed)
        turn = self._turn
        self._clock.after(max(0.0, first.left_s / first.speed), lambda: self._ended(first, turn))

    def _ended(self, step: _Step, turn: int) -> None:
        if turn != self._turn:
            return  # speeds have changed meanwhile, and with them the end
        self._settle()
        self._steps.remove(step)
        self._plan()
        step.done()
