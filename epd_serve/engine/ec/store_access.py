"""How a stage gets to the MM Store: the one place that turns its wiring into a pool, and the ways there and back."""

from __future__ import annotations

from collections.abc import Callable

import torch

from epd_serve import wire
from epd_serve.engine.ec.device_exit import DeviceExit
from epd_serve.engine.ec.device_fetch import FeatureAgent
from epd_serve.engine.ec.device_tier import MooncakeTier
from epd_serve.engine.ec.direct_source import DirectSource
from epd_serve.engine.ec.feature_exit import DirectExit, NoDirectExit
from epd_serve.engine.ec.feature_source import FeatureSource, HostSource
from epd_serve.engine.ec.loading import ArenaReader, FeatureReader, SlabReader
from epd_serve.wiring import StageWiring, worker_endpoint
from npu_ops.memory import DeviceMemory
from npu_ops.torch_memory import memory_here
from store.arena import Arena
from store.feature_pool import FeaturePool, open_pool
from store.mooncake.client import MooncakeConfig
from store.mooncake.tier import MooncakeStore

_SCHEDULER_LOCK_S = 0.02  # holders change an index and let go: who takes longer is stopped, or has no core


def open_local_store(wiring: StageWiring) -> FeaturePool:
    """The arena alone, for a scheduler's own thread: no call waits longer than `_SCHEDULER_LOCK_S` for its index."""
    return FeaturePool(Arena.attach(wiring.arena, lock_timeout_s=_SCHEDULER_LOCK_S))


def open_store(wiring: StageWiring) -> FeaturePool:
    """Attaches the arena, and connects to the second tier in the background where the wiring names one."""
    if not wiring.mooncake_master:
        return open_pool(arena=wiring.arena)
    # On the device path the segment belongs to the client that puts features there.
    segment_bytes = wiring.mooncake_segment_bytes if wiring.feature_path == "host" else 0
    return open_pool(arena=wiring.arena, mooncake=_mooncake(wiring, segment_bytes))


def open_source(
    wiring: StageWiring, pool: FeaturePool, ranks: int, announce: Callable[[wire.FeaturePath], None]
) -> FeatureSource:
    """Where the features of a consumer with `ranks` workers come from. It closes the pool."""
    if wiring.feature_path == "host":
        return HostSource(pool)
    endpoints = [worker_endpoint(wiring.feature_worker_endpoint, rank) for rank in range(ranks)]
    return DirectSource(wiring, pool, endpoints, announce)


def open_reader(wiring: StageWiring, device: torch.device | str, rank: int) -> FeatureReader:
    """What a worker of a consumer loads features with. Called by the model's thread."""
    memory = memory_here(torch.device(device).type)
    arena = ArenaReader(Arena.attach(wiring.arena), memory, owned=True)
    if wiring.feature_path == "host":
        return arena
    tier = _open_tier(wiring, memory)
    agent = FeatureAgent(
        memory,
        lambda: MooncakeTier(tier),
        endpoint=worker_endpoint(wiring.feature_worker_endpoint, rank),
        rank=rank,
        incarnation=wiring.incarnation,
        slab_bytes=wiring.feature_slab_bytes,
    )
    return SlabReader(agent, tier, arena)


def open_exit(wiring: StageWiring, device: torch.device | str, changed: Callable[[], None]) -> DirectExit:
    """How features leave an encoder past the host, if they do. Called by the model's thread."""
    if wiring.feature_path == "host":
        return NoDirectExit()
    memory = memory_here(torch.device(device).type)
    return DeviceExit(wiring, memory, _open_tier(wiring, memory), changed)


def _open_tier(wiring: StageWiring, memory: DeviceMemory) -> MooncakeStore:
    return MooncakeStore(_mooncake(wiring, wiring.mooncake_segment_bytes), begin_thread=memory.enter_thread)


def _mooncake(wiring: StageWiring, segment_bytes: int) -> MooncakeConfig:
    return MooncakeConfig(
        master=wiring.mooncake_master,
        host=wiring.host,
        protocol=wiring.mooncake_protocol,
        segment_bytes=segment_bytes,
    )
