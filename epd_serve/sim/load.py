"""From the state of the simulated engine to the `StageReport` that a real scheduler would publish. Pure."""

from __future__ import annotations

from typing import Protocol

from epd_serve.sim.engine import Rates
from epd_serve.sim.scheduler import Scheduler
from epd_serve.wire import StageReport
from epd_serve.wiring import StageWiring


class Busy(Protocol):
    """What a report is made of: an engine, in whatever time it runs."""

    scheduler: Scheduler
    rates: Rates


def stage_report(wiring: StageWiring, engine: Busy, seq: int) -> StageReport:
    """How busy the engine is now."""
    scheduler, rates = engine.scheduler, engine.rates
    waiting = [*scheduler.waiting, *scheduler.held]
    prompt_tokens = item_tokens = 0
    for sequence in (*waiting, *scheduler.running):  # a planner asks for some thousand of these a second
        if sequence.computed < sequence.to_compute:
            prompt_tokens += sequence.to_compute - sequence.computed
        if sequence.encoding:
            item_tokens += sequence.item_tokens_left
    has_kv = wiring.role.has_language_model
    return StageReport(
        instance=wiring.instance,
        incarnation=wiring.incarnation,
        seq=seq,
        waiting=len(waiting),
        running=len(scheduler.running),
        max_running=scheduler.capacity.max_running,
        pending_prompt_tokens=prompt_tokens,
        pending_item_tokens=item_tokens,
        kv_used=1 - scheduler.free_blocks / scheduler.blocks if has_kv and scheduler.blocks else 0.0,
        kv_tokens=scheduler.capacity.kv_tokens if has_kv else 0,
        step_s=rates.step_s,
        prompt_tokens_per_s=rates.prompt_tokens_per_s,
        item_tokens_per_s=rates.item_tokens_per_s,
        decode_tokens_per_s=rates.decode_tokens_per_s,
        **(scheduler.budgets.report(decoding=bool(scheduler.running)) if scheduler.budgets is not None else {}),
    )
