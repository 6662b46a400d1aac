"""/metrics of a simulated stage: those of vLLM's names that say how busy it is. Pure."""

from __future__ import annotations

from epd_serve.sim.engine import Engine


def metrics_text(engine: Engine, model: str, *, served: int) -> str:
    """Prometheus text. `served`: requests that have begun."""
    scheduler = engine.scheduler
    used = 1 - scheduler.free_blocks / scheduler.blocks if scheduler.blocks else 0.0
    label = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    gauges = {
        "vllm:num_requests_running": len(scheduler.running),
        "vllm:num_requests_waiting": len(scheduler.waiting) + len(scheduler.held),
        "vllm:kv_cache_usage_perc": used,
    }
    counters = {
        "vllm:num_preemptions_total": scheduler.preemptions,
        "epd_sim:requests_total": served,
        "epd_sim:steps_total": engine.steps,
    }
    lines: list[str] = []
    for kind, values in (("gauge", gauges), ("counter", counters)):
        for name, value in values.items():
            lines += [f"# TYPE {name} {kind}", f'{name}{{model_name="{label}"}} {value}']
    return "\n".join(lines) + "\n"
