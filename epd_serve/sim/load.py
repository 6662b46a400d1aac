"""From the state of the simulated engine to the `StageReport` that a real scheduler would publish. Pure."""

from __future__ import annotations

from epd_serve.sim.engine import Engine
from epd_serve.wire import StageReport
from epd_serve.wiring import StageWiring


def stage_report(wiring: StageWiring, engine: Engine, seq: int) -> StageReport:
    """How busy the engine is now."""
    scheduler, rates = engine.scheduler, engine.rates
    has_kv = wiring.role.has_language_model
    return StageReport(
        instance=wiring.instance,
        incarnation=wiring.incarnation,
        seq=seq,
        waiting=len(scheduler.waiting) + len(scheduler.held),
        running=len(scheduler.running),
        max_running=scheduler.capacity.max_running,
        pending_prompt_tokens=scheduler.pending_prompt_tokens,
        pending_item_tokens=scheduler.pending_item_tokens,
        kv_used=1 - scheduler.free_blocks / scheduler.blocks if has_kv and scheduler.blocks else 0.0,
        kv_tokens=scheduler.capacity.kv_tokens if has_kv else 0,
        shared_tokens=scheduler.capacity.step_tokens if scheduler.shares_steps else 0,
        step_s=rates.step_s,
        prompt_tokens_per_s=rates.prompt_tokens_per_s,
        item_tokens_per_s=rates.item_tokens_per_s,
        decode_tokens_per_s=rates.decode_tokens_per_s,
        **(scheduler.budgets.report(decoding=bool(scheduler.running)) if scheduler.budgets is not None else {}),
    )
