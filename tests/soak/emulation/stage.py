"""A stage in virtual time: a clock, a device that stages may share, and the scheduler of a simulated stage on it. Pure.

What `epd_serve/sim/engine.py` is in real time. Which request a stage gets when is not its business. On the clock what
is due next happens next, and no time passes but by that.

Each step is a mixture of kinds of work. While steps run side by side on a device each goes on at 1 / slowdown of its
speed alone, and when one ends, or another one begins, the others' speeds change. A step alone takes just its time.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from epd_serve.roles import Role
from epd_serve.sim.engine import Rates
from epd_serve.sim.profile import Profile
from epd_serve.sim.scheduler import Scheduler, Step
from tests.soak.emulation.device import DECODE, ENCODE, PREFILL

Mixture = Mapping[str, float]
"""Share of a step's time alone by kind of work; they sum to 1."""
Slowdowns = Mapping[frozenset[str], float]
"""How many times as long both of two kinds of work take while they run side by side."""
"""(sequence, kind of work, begin, end) of each part of a step that worked on it."""


class Clock:
    """Calls in order of their times; of one time, in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call it so many seconds from now, after what is due then already."""
        assert seconds >= 0, f"{seconds} s from now is over"
        heapq.heappush(self._due, (self.now_s + seconds, next(self._numbers), call))

    def run(self) -> None:
        """Until nothing is due any more."""
        while self._due:
            self.now_s, _, call = heapq.heappop(self._due)
            call()


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
class _Running:
    """`left_s`: of its time alone. `speed`: of its speed alone."""

    mixture: Mixture
    left_s: float
    done: Callable[[], None]
    speed: float = 1.0


class SharedDevice:
    """Runs steps and calls back when each is done."""

    def __init__(self, clock: Clock, slowdowns: Slowdowns) -> None:
        self._clock, self._slowdowns = clock, slowdowns
        self._steps: list[_Running] = []
        self._advanced_to_s = 0.0
        self._plan = 0

    def run(self, mixture: Mixture, seconds: float, done: Callable[[], None]) -> None:
        """Begin a step that takes `seconds` alone."""
        self._advance()
        self._steps.append(_Running(mixture, seconds, done))
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

    def _end(self, step: _Running, plan: int) -> None:
        if plan == self._plan:
            self._advance()
            self._steps.remove(step)
            self._plan_next_end()
            step.done()


class VirtualStage:
    """One instance.

    Attributes:
        scheduler: who changes it calls `wake`. rates: as of a simulated stage, so that `stage_report` reads them.
    """

    def __init__(self, name: str, role: Role, profile: Profile, device: SharedDevice, clock: Clock) -> None:
        self.name, self.role = name, role
        self.scheduler, self.rates = Scheduler(profile.capacity), Rates()
        self._profile, self._device, self._clock = profile, device, clock
        self._factor = profile.factors(name)
        self._busy = False

    def wake(self) -> None:
        """An idle stage begins a step when all that comes at this moment is here."""
        if not self._busy:
            self._busy = True
            self._clock.after(0.0, self._begin)

    def _begin(self) -> None:
        step = self.scheduler.plan()
        self._busy = bool(step)
        if step:
            parts_s = self._profile.step_parts_s(step.item_tokens, step.prompt_tokens, len(step.decodes))
            parts, begun_s = dict(zip((ENCODE, PREFILL, DECODE), parts_s, strict=True)), self._clock.now_s
            self._device.run(
                mixture(**parts), sum(parts_s) * self._factor(), lambda: self._complete(step, begun_s, parts_s[2])
            )

    def _complete(self, step: Step, begun_s: float, decode_s: float) -> None:
        self.rates.took(step, self._clock.now_s - begun_s, decode_s)
        self.scheduler.complete(step)
        self._begin()
