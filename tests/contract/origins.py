"""What the sources cannot tell: where values come from that are `Any` to us. Data; `tests/contract` holds every
line of it to be needed still.

A type is a canonical name of the wheel; `module x.y` a module; alternatives are joined by ` | `.
"""

from __future__ import annotations

from dataclasses import dataclass

_SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"
_ANY_SCHEDULER = f"{_SCHEDULER} | vllm.v1.core.sched.async_scheduler.AsyncScheduler"


@dataclass(frozen=True)
class Origin:
    """In the function (or class) `where` of `path`, `name` is a `type`."""

    path: str
    where: str
    name: str
    type: str


ORIGINS = (
    Origin("epd_serve/engine/kv/mooncake_endpoint.py", "MooncakeEndpoint.__init__", "self.engine",
           "mooncake.engine.TransferEngine"),
    Origin("epd_serve/engine/kv/mooncake_writes.py", "Writes.run", "engine", "mooncake.engine.TransferEngine"),
    Origin("epd_serve/engine/kv/mooncake_writes.py", "Writes._run_lists", "engine",
           "mooncake.engine.TransferEngine"),
    Origin("epd_serve/engine/kv/mooncake_writes.py", "Writes._finish_oldest", "engine",
           "mooncake.engine.TransferEngine"),
    Origin("epd_serve/engine/status/scheduler.py", "_vllms_choice", "vllm_config", "vllm.config.vllm.VllmConfig"),
    Origin("epd_serve/engine/status/scheduler.py", "reporting", "base", f"type[{_ANY_SCHEDULER}]"),
    Origin("epd_serve/engine/status/watch.py", "LoadWatch.__init__", "scheduler", _ANY_SCHEDULER),
    Origin("npu_ops/core_limits.py", "_npu_limit", "npu", "module torch_npu.npu"),
    Origin("npu_ops/core_limits.py", "limit_at_set_device", "npu", "module torch_npu.npu"),
    Origin("npu_ops/core_limits.py", "limit_npu", "npu", "module torch_npu.npu"),
    Origin("npu_ops/fences.py", "EventFence.__init__", "module", "module torch_npu.npu"),
    Origin("npu_ops/torch_memory.py", "_StreamMemory.__init__", "module", "module torch_npu.npu"),
    Origin("store/mooncake/client.py", "MooncakeClient.__init__", "engine", "mooncake.engine.TransferEngine"),
    Origin("store/mooncake/client.py", "MooncakeClient.__init__", "module", "module mooncake.store"),
    Origin("store/mooncake/client.py", "begin_engine", "engine", "mooncake.engine.TransferEngine"),
)  # fmt: skip

# Protocols that stand for a class: whatever they name, the class must have.
STAND_INS = (
    Origin("epd_serve/engine/status/pending.py", "", "Position", "vllm.multimodal.inputs.PlaceholderRange"),
    Origin("epd_serve/engine/status/pending.py", "", "Feature", "vllm.multimodal.inputs.MultiModalFeatureSpec"),
    Origin("epd_serve/engine/status/pending.py", "", "EngineRequest", "vllm.v1.request.Request"),
    Origin("epd_serve/engine/status/pending.py", "", "Step", "vllm.v1.core.sched.output.SchedulerOutput"),
)

# Methods of a subclass that are no hooks.
OURS = {"epd_serve/engine/status/scheduler.py": {"watch_load"}}

# Modules that another package puts into torch's namespace.
GRAFTED = {"torch.npu": "torch_npu.npu"}

# Files whose lists, tuples and sets hold flags of a program: which package declares them.
FLAGS = {
    "epd_serve/engine/argv.py": "vllm",
    "deploy/options/stage_args.py": "vllm",
    "deploy/plan/proxy_settings.py": "vllm",
    "store/mooncake/master.py": "mooncake",
    "deploy/agent/second_tier.py": "mooncake",
}

# Functions and tables whose strings are words of a package (attributes, keys): which one. A dot joins two of them.
WORDS = {
    ("deploy/options/stage_args.py", "SCHEDULERS"): "vllm_ascend",
    ("epd_serve/engine/argv.py", "SHARED_NPU_SETTINGS"): "vllm_ascend",
    ("epd_serve/engine/compat.py", "schedule_as_vllm_does"): "vllm_ascend",
}

# Functions that may only be called where what they import exists, and why that holds.
GUARDED = {
    ("epd_serve/engine/compat.py", "_metadata_resolver"): "both callers ask `metadata_travels` first",
}
