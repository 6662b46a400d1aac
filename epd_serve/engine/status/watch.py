"""Looks at the scheduler after each of its calls and keeps the report of it up to date.

Runs in the scheduler's thread, between steps: it counts as often as takes a small share of that thread's time. It never
misses the last request, because an engine without requests sleeps and would not be looked at again, nor the first one,
whose step may take a second. Sending, and the pace of it, is the publisher's thread.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from epd_serve.budgets import Budgets
from epd_serve.engine.status.pending import StepWork, pending, step_work
from epd_serve.engine.status.rates import StepRates
from epd_serve.engine.step_budgets import shared_tokens
from epd_serve.trace import STEP, Trace
from epd_serve.wire import StageReport
from epd_serve.wiring import StageWiring

logger = logging.getLogger(__name__)

COUNT_SHARE = 0.01
"""Of the scheduler's time, as long as that means no less than twice a second."""

RARELY_S = 0.5

MAX_STEPS = 64
"""Steps in flight; more than any pipeline holds, so that steps that never end are not kept for ever."""


@dataclass(frozen=True)
class _RunningStep:
    output: Any
    work: StepWork
    begun_at: float


class LoadWatch:
    """The load of one engine. A defect in it must not end the engine: it says so once and reports no load from then
    on, with which proxies go by what they have in flight.

    Args:
        scheduler: vLLM's, after its `__init__`.
        offer: takes each new report, whose `seq` is 0; must not block.
        budgets: are told how long steps take, where there are any.
        trace: gets a stamp `step` of nobody's (subject "") for each step that did something, with its `StepWork`.
    """

    def __init__(
        self,
        scheduler: Any,
        wiring: StageWiring,
        offer: Callable[[StageReport], None],
        *,
        budgets: Budgets | None = None,
        trace: Trace | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._wiring = wiring
        self._offer = offer
        self._clock = clock
        self._budgets = budgets
        self._trace = trace
        self._running: deque[_RunningStep] = deque(maxlen=MAX_STEPS)
        self._rates = StepRates()
        self._due_at = float("-inf")
        self._told_idle = True
        self._broken = False

    def scheduled(self, output: Any) -> None:
        """A step begins: `output` is what `schedule` gave."""
        self._guarded(lambda: self._begin(output))

    def updated(self, output: Any) -> None:
        """The step of this output has ended."""
        self._guarded(lambda: self._end(output))

    def changed(self) -> None:
        """Requests came or went."""
        self._guarded(self._count)

    def _guarded(self, look: Callable[[], None]) -> None:
        if self._broken:
            return
        try:
            look()
        except Exception:
            logger.exception("the load of this engine cannot be counted; it is reported as none from here on")
            self._broken = True
            self._offer(StageReport(self._wiring.instance, self._wiring.incarnation, 0))

    def _begin(self, output: Any) -> None:
        if work := step_work(output, self._scheduler.requests):
            self._running.append(_RunningStep(output, work, self._clock()))
        self._count()

    def _end(self, output: Any) -> None:
        # Steps end in the order in which they began: those before this one that did not are lost.
        while any(step.output is output for step in self._running):
            step = self._running.popleft()
            if step.output is output:
                work, now = step.work, self._clock()
                seconds = self._rates.ended(work, step.begun_at, now)
                if self._budgets is not None:
                    self._budgets.measured(
                        seconds, decodes=work.decodes, prompt_tokens=work.prompt_tokens, item_tokens=work.item_tokens
                    )
                if self._trace is not None:
                    self._trace.stamp("", STEP, t0=now - seconds, **vars(work))
        self._count()

    def _count(self) -> None:
        now, scheduler = self._clock(), self._scheduler
        if now < self._due_at and scheduler.requests and not self._told_idle:
            return
        role = self._wiring.role
        cached = getattr(scheduler.encoder_cache_manager, "cached", {})  # encoder-decoder models keep none
        found = pending(scheduler.requests.values(), encoded=cached.__contains__ if role.encodes else None)
        model = role.has_language_model
        self._due_at = now + min((self._clock() - now) / COUNT_SHARE, RARELY_S)
        self._told_idle = not (found.waiting or found.running)
        self._offer(
            StageReport(
                instance=self._wiring.instance,
                incarnation=self._wiring.incarnation,
                seq=0,
                waiting=found.waiting,
                running=found.running,
                pending_prompt_tokens=found.prompt_tokens + sum(step.work.prompt_tokens for step in self._running),
                pending_item_tokens=found.item_tokens + sum(step.work.item_tokens for step in self._running),
                kv_used=float(scheduler.kv_cache_manager.usage) if model else 0.0,
                kv_tokens=int(scheduler.cache_config.num_gpu_blocks * scheduler.block_size) if model else 0,
                max_running=int(scheduler.max_num_running_reqs),
                shared_tokens=shared_tokens(scheduler) if model else 0,
                step_s=self._rates.step_s,
                prompt_tokens_per_s=self._rates.prompt_tokens_per_s,
                item_tokens_per_s=self._rates.item_tokens_per_s,
                decode_tokens_per_s=self._rates.decode_tokens_per_s,
                **(self._budgets.report(decoding=found.running > 0) if self._budgets is not None else {}),
            )
        )
