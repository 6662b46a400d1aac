"""The simulated engine: steps of the scheduler in the time that the profile says they take. Lives in one event loop.

Idle it waits for work and uses no CPU. Steps are timed against a running clock, so that the resolution of the event
loop's timers does not add up: short steps are made up for together.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from epd_serve.budgets import Budgets
from epd_serve.sim.profile import Profile
from epd_serve.sim.scheduler import Scheduler, Step
from epd_serve.sim.sequence import Sequence
from epd_serve.trace import STEP, Trace
from epd_serve.wire import FEW_PROMPT_TOKENS

_SHORTEST_SLEEP_S = 0.0005
_LATE_S = 0.02  # being later than that is the machine's fault, and is not made up for
_SMOOTH = 0.1  # weight of the last step in a mean


class _Speed:
    """Of recent steps: what they did, per second that they took. A step of little counts as little, as at a real stage
    (`epd_serve/engine/status/rates.py`)."""

    def __init__(self) -> None:
        self._amount = self._seconds = 0.0

    def after(self, amount: float, seconds: float) -> float:
        """What it is once one more step has taken so long for that much."""
        self._amount, self._seconds = _mean(self._amount, amount), _mean(self._seconds, seconds)
        return self._amount / self._seconds


class Rates:
    """Means over recent steps; 0 while unknown. As `wire.StageReport` has them."""

    def __init__(self) -> None:
        self.step_s = self.prompt_tokens_per_s = self.item_tokens_per_s = self.decode_tokens_per_s = 0.0
        self._prompt, self._items = _Speed(), _Speed()

    def took(self, step: Step, seconds: float, decode_s: float) -> None:
        """Count a step. `decode_s`: what its decodes alone would have taken."""
        self.step_s = _mean(self.step_s, seconds)
        if seconds <= 0:
            return
        if (prompt_tokens := step.prompt_tokens) >= FEW_PROMPT_TOKENS:
            self.prompt_tokens_per_s = self._prompt.after(prompt_tokens, seconds)
        if step.encodes and (item_tokens := step.item_tokens):
            self.item_tokens_per_s = self._items.after(item_tokens, seconds)
        if step.decodes:
            self.decode_tokens_per_s = _mean(self.decode_tokens_per_s, 1 / max(seconds, decode_s))


def _mean(before: float, now: float) -> float:
    return now if before == 0 else before + _SMOOTH * (now - before)


class Engine:
    """Runs sequences. `run` goes on until it is cancelled.

    Attributes:
        steps, item_count: steps done, items encoded in them.
        slowness: factor on all times, a fault on demand.
        changed: called after every step and arrival, for those who report the load.
        trace: gets a stamp of each step, as a real one does.
    """

    def __init__(
        self,
        profile: Profile,
        instance: str,
        *,
        priorities: bool = False,
        shares_steps: bool = False,
        budgets: Budgets | None = None,
        trace: Trace | None = None,
    ) -> None:
        self.profile = profile
        self.scheduler = Scheduler(profile.capacity, priorities=priorities, shares_steps=shares_steps, budgets=budgets)
        self.rates = Rates()
        self.slowness = 1.0
        self.steps = 0
        self.item_count = 0
        self.changed: Callable[[], None] = lambda: None
        self._factor = profile.factors(instance)
        self._trace = trace
        self._work = asyncio.Event()

    def submit(self, sequence: Sequence, *, held: bool = False) -> None:
        self.scheduler.add(sequence, held=held)
        self._ring()

    def release(self, sequence: Sequence) -> None:
        """See `Scheduler.release`."""
        self.scheduler.release(sequence)
        self._ring()

    def loaded(self, sequence: Sequence) -> None:
        """See `Scheduler.loaded`."""
        self.scheduler.loaded(sequence)
        self._ring()

    def remove(self, sequence: Sequence) -> None:
        """See `Scheduler.remove`."""
        self.scheduler.remove(sequence)
        self._ring()

    def free(self, sequence: Sequence) -> None:
        """See `Scheduler.free`."""
        self.scheduler.free(sequence)
        self._ring()

    async def run(self) -> None:
        due = 0.0
        while True:
            step = self.scheduler.plan()
            if not step:
                self._work.clear()
                await self._work.wait()
                due = 0.0  # what it had been late by is nobody's any more
                continue
            seconds = self._seconds(step)
            now = time.monotonic()
            due = max(due, now - _LATE_S) + seconds if due else now + seconds
            await asyncio.sleep(due - now if due - now >= _SHORTEST_SLEEP_S else 0)
            if self._trace is not None:
                self._stamp(self._trace, step, seconds)
            self.steps += 1
            self.item_count += len(step.encodes)
            self.rates.took(step, seconds, self.profile.decode_s(len(step.decodes)))
            if self.scheduler.budgets is not None:
                self.scheduler.budgets.measured(
                    seconds,
                    decodes=len(step.decodes),
                    prompt_tokens=step.prompt_tokens,
                    item_tokens=step.item_tokens,
                )
            self.scheduler.complete(step)
            self.changed()

    def _seconds(self, step: Step) -> float:
        parts_s = self.profile.step_parts_s(
            step.item_tokens,
            step.prompt_tokens,
            len(step.decodes),
            item_pairs=step.item_pairs,
            context_tokens=step.context_tokens,
            kv_tokens=step.kv_tokens,
        )
        return sum(parts_s) * self._factor() * self.slowness

    def _stamp(self, trace: Trace, step: Step, seconds: float) -> None:
        trace.stamp(
            "",
            STEP,
            t0=time.monotonic() - seconds,
            prompt_tokens=step.prompt_tokens,
            item_tokens=step.item_tokens,
            decodes=len(step.decodes),
            item_pairs=step.item_pairs,
            context_tokens=round(step.context_tokens),
            kv_tokens=step.kv_tokens,
        )

    def _ring(self) -> None:
        self._work.set()
        self.changed()
