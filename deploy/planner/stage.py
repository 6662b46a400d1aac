"""A stage in virtual time: a clock, a device that stages may share, and the scheduler of a simulated stage on it. Pure.

What `epd_serve/sim/engine.py` is in real time. Which request a stage gets when is not its business. On the clock what
is due next happens next, and no time passes but by that.

Each step is a mixture of kinds of work. While steps run side by side on a device each goes on at 1 / slowdown of its
speed alone, and when one ends, or another one begins, the others' speeds change. A step alone takes just its time.
What other devices of a host do slows a step by little, and by what each of them has done on average so far.

Equal steps of decodes that follow one another are one event, which ends early, after the step that it is in, when
something comes to the stage or its speed changes: a day of traffic is some million arrivals and a thousand times as
many steps.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from deploy.planner.profile import DECODE, ENCODE, KINDS, PREFILL
from epd_serve.budgets import Budgets
from epd_serve.roles import Role
from epd_serve.sim.engine import Rates
from epd_serve.sim.profile import Profile
from epd_serve.sim.scheduler import Scheduler, Step

Mixture = Mapping[str, float]
"""Share of a step's time alone by kind of work; they sum to 1."""
DECODES: Mixture = {DECODE: 1.0}
"""Of a step that decodes alone, as most do."""
Slowdowns = Mapping[tuple[str, str], float]
"""How many times as long the first of two kinds of work takes while they run side by side; both take as much longer."""

Beside = Mapping[str, Sequence[tuple[str, float]]]
"""By kind of work: how many times as long it takes, less 1, while another device of the host does which other kind."""

MOST_STEPS = 1 << 20
"""Planned as one event."""
FEW = 32
"""Steps, of which each is drawn by itself."""


class Clock:
    """Calls in order of their times; of one time, in the order in which they were asked for.

    Attributes:
        stopped: set to end `run`, whatever is due.
    """

    def __init__(self, begin_s: float = 0.0) -> None:
        self.now_s = begin_s
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.stopped = False

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call it so many seconds from now, after what is due then already."""
        assert seconds >= 0, f"{seconds} s from now is over"
        heapq.heappush(self._due, (self.now_s + seconds, next(self._numbers), call))

    @property
    def idle(self) -> bool:
        """Nothing is due."""
        return not self._due

    def run(self) -> None:
        """Until nothing is due any more."""
        while self._due and not self.stopped:
            self.now_s, _, call = heapq.heappop(self._due)
            call()


def mixture(**seconds: float) -> Mixture:
    """Returns that of a step whose parts take so long. A step that takes no time is no mixture."""
    total_s = sum(seconds.values())
    return {kind: part_s / total_s for kind, part_s in seconds.items() if part_s > 0} if total_s > 0 else {}


def slowdown(own: Mixture, others: Iterable[Mixture], slowdowns: Slowdowns) -> float:
    """How many times as long work of mixture `own` takes beside `others`: what each of them adds, summed."""
    return 1.0 + sum(
        share * other_share * (slowdowns[kind, other_kind] - 1.0)
        for other in others
        for kind, share in own.items()
        for other_kind, other_share in other.items()
    )


@dataclass(eq=False, slots=True)
class Work:
    """A step on a device.

    Attributes:
        left_s: of its time alone. speed: of its speed alone.
        changed: called when its speed has changed; returns by how much, of its time alone, it will be done earlier.
    """

    mixture: Mixture
    left_s: float
    done: Callable[[], None]
    changed: Callable[[], float] | None = None
    speed: float = 0.0


class SharedDevice:
    """Runs steps and calls back when each is done."""

    def __init__(self, clock: Clock, slowdowns: Slowdowns) -> None:
        self._clock, self._slowdowns = clock, slowdowns
        self._steps: list[Work] = []
        self._advanced_to_s = 0.0
        self._plan = 0

    @property
    def under_way(self) -> int:
        """Steps."""
        return len(self._steps)

    def run(
        self, mixture: Mixture, seconds: float, done: Callable[[], None], changed: Callable[[], float] | None = None
    ) -> Work:
        """Begin a step that takes `seconds` alone."""
        self.advance()
        work = Work(mixture, seconds, done, changed)
        self._steps.append(work)
        self._plan_next_end()
        return work

    def shorten(self, work: Work, seconds: float) -> None:
        """It will be done so much earlier, of its time alone."""
        work.left_s -= seconds
        self._plan_next_end()

    def advance(self) -> None:
        """What is left of each step is that of now."""
        passed_s = self._clock.now_s - self._advanced_to_s
        if passed_s:
            self._advanced_to_s = self._clock.now_s
            for step in self._steps:
                step.left_s -= passed_s * step.speed

    def _plan_next_end(self) -> None:
        """Set the speeds from now on; any end that was planned before no longer holds."""
        self._plan += 1
        steps = self._steps
        if not steps:
            return
        for step in steps:
            before, step.speed = step.speed, self._speed(step) if len(steps) > 1 else 1.0
            if before not in (0.0, step.speed) and step.changed is not None:
                step.left_s -= step.changed()
        first = min(steps, key=lambda step: step.left_s / step.speed) if len(steps) > 1 else steps[0]
        plan = self._plan
        self._clock.after(max(0.0, first.left_s / first.speed), lambda: self._end(first, plan))

    def _speed(self, step: Work) -> float:
        """Of its speed alone, beside the others."""
        others = [other.mixture for other in self._steps if other is not step]
        return 1.0 / slowdown(step.mixture, others, self._slowdowns)

    def _end(self, step: Work, plan: int) -> None:
        if plan == self._plan:
            self.advance()
            self._steps.remove(step)
            self._plan_next_end()
            step.done()


class Gaps:
    """The steps of one stage that decoded, counted: whoever decodes in all of them has a token in each.

    Args:
        spread: as of `DeviceProfile`. How many of some steps are within a limit is drawn by it.
        name: of the stage; equal ones draw alike.

    Attributes:
        limits_s: of gaps. steps: so far. within: by limit, those of them that took no longer.
    """

    __slots__ = ("_chance", "_spread", "limits_s", "steps", "within")

    def __init__(self, limits_s: Sequence[float], spread: Sequence[float] = (), name: str = "") -> None:
        self.limits_s = tuple(limits_s)
        self._spread, self._chance = spread or (1.0,), random.Random(name)
        self.steps = 0
        self.within = [0] * len(self.limits_s)

    def add(self, times: int, seconds: float) -> None:
        self.steps += times
        for at, limit_s in enumerate(self.limits_s):
            share = bisect.bisect_right(self._spread, limit_s / seconds) / len(self._spread) if seconds > 0 else 1.0
            self.within[at] += times * int(share) if share in (0.0, 1.0) else self._drawn(times, share)

    def _drawn(self, times: int, share: float) -> int:
        """How many of so many, each with this chance; of many, by the normal distribution that is near it."""
        if times <= FEW:
            return sum(self._chance.random() < share for _ in range(times))
        found = self._chance.gauss(times * share, math.sqrt(times * share * (1 - share)))
        return min(times, max(0, round(found)))


class VirtualStage:
    """One instance. What it would report of its load it has as attributes (`proxy.registry.instance_state.Reported`).

    Args:
        limits_s: of gaps between tokens, for `gaps`. spread: of steps.
        slow: how many times the profile's time its steps take.

    Attributes:
        role: of a P or D it may change. slow: as given; another one counts from the next step on.
        scheduler: who changes it calls `wake`. rates: as of a simulated stage.
        begun_s: when it was made. gaps: its steps.
        busy_s: by kind of work, how long it has worked, by the time of a stage alone.
        stepped: called with the seconds of each step with decodes, for its neighbours.
        changed: called when it is as busy as before no more. gave: called after that where it may have room for
            something new: not between decodes that follow one another.
        others, beside: on other devices of its host, and how much they slow it.
    """

    def __init__(
        self,
        name: str,
        role: Role,
        profile: Profile,
        device: SharedDevice,
        clock: Clock,
        *,
        budgets: Budgets | None = None,
        limits_s: Sequence[float] = (),
        spread: Sequence[float] = (),
        slow: float = 1.0,
    ) -> None:
        self.name, self.role = name, role
        self.scheduler = Scheduler(
            profile.capacity, priorities=role.has_language_model, shares_steps=role.sends_kv, budgets=budgets
        )
        self.rates = Rates()
        self.gaps = Gaps(limits_s, spread, name)
        self.busy_s = dict.fromkeys(KINDS, 0.0)
        self.device = device
        self.stepped: Callable[[float], None] = lambda seconds: None
        self.changed: Callable[[], None] = lambda: None
        self.gave: Callable[[], None] = lambda: None
        self.others: Sequence[VirtualStage] = ()
        self.beside: Beside = {}
        self._profile, self._clock, self.begun_s = profile, clock, clock.now_s
        self._factor, self.slow = profile.factors(name), slow
        self._most = 1 if profile.jitter else MOST_STEPS
        self._busy = False
        self._run: _Run | None = None

    def wake(self) -> None:
        """Something has changed. An idle stage begins a step when all that comes at this moment is here."""
        self.changed()
        if not self._busy:
            self._busy = True
            self._clock.after(0.0, self._begin)
        elif self._run is not None and self._run.work is not None:
            self.device.advance()
            if earlier_s := self._cut():
                self.device.shorten(self._run.work, earlier_s)

    @property
    def decode_s(self) -> float:
        """Of a step in which all that run here decode, alone on the device."""
        return self._profile.decode_s(len(self.scheduler.running)) * self.slow

    @property
    def waiting(self) -> int:
        return len(self.scheduler.waiting) + len(self.scheduler.held)

    @property
    def running(self) -> int:
        return len(self.scheduler.running)

    @property
    def pending_prompt_tokens(self) -> int:
        return self.scheduler.pending_prompt_tokens

    @property
    def pending_item_tokens(self) -> int:
        return self.scheduler.pending_item_tokens

    @property
    def max_running(self) -> int:
        return self.scheduler.capacity.max_running

    @property
    def kv_tokens(self) -> int:
        return self.scheduler.capacity.kv_tokens

    @property
    def kv_used(self) -> float:
        """With what decodes have filled since steps began that count as one."""
        scheduler, run, more = self.scheduler, self._run, 0
        if run is not None and run.times > 1 and run.work is not None and run.alone_s > 0:
            self.device.advance()
            tokens, size = run.done() + 1, scheduler.capacity.block_tokens
            more = sum([max(0, -(-(one.computed + tokens) // size) - one.blocks) for one in run.step.decodes])
        return 1 - (scheduler.free_blocks - more) / scheduler.blocks

    @property
    def fills(self) -> bool:
        """Before steps end that count as one, its KV may come to leave no room for a prompt."""
        run, scheduler = self._run, self.scheduler
        if run is None or run.times == 1:
            return False
        room = scheduler.free_blocks * scheduler.capacity.block_tokens - run.times * len(run.step.decodes)
        return room < scheduler.capacity.max_model_len

    @property
    def shared_tokens(self) -> int:
        return self.scheduler.capacity.step_tokens if self.scheduler.shares_steps else 0

    @property
    def prompt_tokens_per_s(self) -> float:
        return self.rates.prompt_tokens_per_s

    @property
    def item_tokens_per_s(self) -> float:
        return self.rates.item_tokens_per_s

    @property
    def steps(self) -> bool:
        """A step is under way."""
        return self._run is not None

    @property
    def step_age_s(self) -> float:
        """Since the step that is under way began; 0 where there is none, or none but decodes."""
        run = self._run
        return self._clock.now_s - run.begun_s if run is not None and run.mixture is not DECODES else 0.0

    def _begin(self) -> None:
        scheduler = self.scheduler
        step = scheduler.plan(self._most) if scheduler.running or scheduler.waiting else None
        self.changed()
        self._busy = bool(step)
        if not step:
            self._run = None
            return
        one_s, decode_s, mixed = self._times(step)
        alone_s = one_s * self._factor() * self.slow * self._slowed_by_others(mixed)
        self._run = run = _Run(step, self._clock.now_s, alone_s, decode_s, mixed, step.times)
        run.work = self.device.run(mixed, alone_s * step.times, self._complete, self._cut)

    def _times(self, step: Step) -> tuple[float, float, Mixture]:
        """Seconds of one such step by the profile, those of its decodes, and what it is a mixture of."""
        profile, batch = self._profile, len(step.decodes)
        kv_tokens = step.kv_tokens + batch * (step.times - 1) / 2 if batch and profile.decode_kv_s else 0.0
        if not (step.prefills or step.encodes):
            decode_s = profile.decode_s(batch, kv_tokens)
            return decode_s, decode_s, DECODES if decode_s else {}
        parts_s = profile.step_parts_s(
            step.item_tokens,
            step.prompt_tokens,
            batch,
            item_pairs=step.item_pairs if profile.encode_context_s else 0.0,
            context_tokens=step.context_tokens if profile.prefill_context_s else 0.0,
            kv_tokens=kv_tokens,
        )
        return sum(parts_s), parts_s[2], mixture(**dict(zip((ENCODE, PREFILL, DECODE), parts_s, strict=True)))

    def _slowed_by_others(self, mixed: Mixture) -> float:
        """How many times as long a step takes beside what `others` do, by their shares of the time they are there."""
        more = 0.0
        for other in self.others:
            if there_s := self._clock.now_s - other.begun_s:
                for kind, share in mixed.items():
                    for other_kind, slows in self.beside.get(kind, ()):
                        more += share * other.busy_s[other_kind] / there_s * slows
        return 1.0 + more

    def _cut(self) -> float:
        """Of the steps that count as one, the one that is under way is the last. Returns the seconds, of a stage alone,
        by which they end earlier."""
        run = self._run
        if run is None or run.times == 1 or run.work is None or run.cut or run.alone_s <= 0:
            return 0.0
        done_s = run.alone_s * run.times - run.work.left_s
        run.cut, run.full = True, run.done()
        if run.full:
            run.each_s = (self._clock.now_s - run.begun_s) * run.alone_s / done_s
        less, run.times = run.times - run.full - 1, run.full + 1
        return less * run.alone_s

    def _complete(self) -> None:
        run = self._run
        assert run is not None
        step, seconds = run.step, self._clock.now_s - run.begun_s
        each_s = seconds / run.times
        self._run = None
        if step.decodes:
            if run.cut and run.full:
                self.gaps.add(run.full, run.each_s)
                self.gaps.add(1, seconds - run.full * run.each_s)
            else:
                self.gaps.add(run.times, each_s)
            self.stepped(each_s)
        for kind, share in run.mixture.items():
            self.busy_s[kind] += share * run.alone_s * run.times
        self.rates.took(step, each_s, run.decode_s)
        if (budgets := self.scheduler.budgets) is not None:
            work = {"prompt_tokens": step.prompt_tokens, "item_tokens": step.item_tokens}
            for _ in range(run.times):
                budgets.measured(each_s, decodes=len(step.decodes), **work)
        before = self.running
        self.scheduler.complete(step, run.times)
        if step.prefills or step.encodes or self.running < before:
            self.gave()
        self._begin()


@dataclass(eq=False, slots=True)
class _Run:
    """Equal steps that count as one.

    Attributes:
        alone_s: of one, alone. decode_s: of its decodes. times: how many.
        cut: it was cut. full, each_s: how many had ended before that, and how long each had taken.
    """

    step: Step
    begun_s: float
    alone_s: float
    decode_s: float
    mixture: Mixture
    times: int
    full: int = 0
    each_s: float = 0.0
    cut: bool = False
    work: Work | None = None

    def done(self) -> int:
        """How many have ended, as its device has advanced."""
        assert self.work is not None
        return min(self.times - 1, int(self.times - self.work.left_s / self.alone_s + 1e-9))
