"""How a stage gets to the MM Store: the one place that turns its wiring into a pool, or into a reader of the arena."""

from __future__ import annotations

import torch

from epd_serve.engine.ec.loading import ArenaReader
from epd_serve.wiring import StageWiring
from npu_ops.torch_memory import memory_here
from store.arena import Arena
from store.feature_pool import FeaturePool, open_pool
from store.mooncake.client import MooncakeConfig

_SCHEDULER_LOCK_S = 0.02  # holders change an index and let go: who takes longer is stopped, or has no core


def open_local_store(wiring: StageWiring) -> FeaturePool:
    """The arena alone, for a scheduler's own thread: no call waits longer than `_SCHEDULER_LOCK_S` for its index."""
    return FeaturePool(Arena.attach(wiring.arena, lock_timeout_s=_SCHEDULER_LOCK_S))


def open_store(wiring: StageWiring) -> FeaturePool:
    """Attaches the arena, and connects to the second tier in the background where the wiring names one."""
    if not wiring.mooncake_master:
        return open_pool(arena=wiring.arena)
    config = MooncakeConfig(
        master=wiring.mooncake_master,
        host=wiring.host,
        protocol=wiring.mooncake_protocol,
        segment_bytes=wiring.mooncake_segment_bytes,
    )
    return open_pool(arena=wiring.arena, mooncake=config)


def open_reader(wiring: StageWiring, device: torch.device | str) -> ArenaReader:
    """What a worker of a consumer loads features with. Called by the model's thread."""
    return ArenaReader(Arena.attach(wiring.arena), memory_here(torch.device(device).type), owned=True)


def remote_counters(pool: FeaturePool) -> dict[str, int]:
    """What this process did with the second tier, as a `StoreReport` counts it; nothing where there is none."""
    return {f"pool.{name}": count for name, count in pool.remote_counts().items() if count}
