"""How a stage gets to the MM Store: the one place that turns its wiring into a pool, or into a reader of the arena,
and a worker's copy of what is pinned there into vLLM's encoder cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from epd_serve.engine.capture_gate import CaptureGate, capture_gate
from epd_serve.engine.ec.step import FeatureSlot
from epd_serve.wiring import StageWiring
from npu_ops.memory import DeviceMemory
from npu_ops.torch_memory import memory_here
from store.arena import Arena
from store.errors import StoreUnavailableError
from store.feature import Bytes
from store.feature_pool import FeaturePool, open_pool
from store.mooncake.client import ASCEND, MooncakeConfig

SCHEDULER_LOCK_S = 0.02
"""How long a scheduler's thread waits for the arena: holders change an index and let go, so who takes longer is
stopped, or has no core."""

CAPTURES_S = 5.0
"""How long a thread waits for captures at a time; the second tier counts as down meanwhile."""

SPARE_S = 1.0
"""What was stored or used within that time is not evicted: an encoder with much to say waits for whoever needs it, for
a moment, and what is used again and again stays (`features.py`)."""


def open_local_store(wiring: StageWiring) -> FeaturePool:
    """The arena alone, for a scheduler's own thread: no call waits longer than `SCHEDULER_LOCK_S` for its index."""
    return FeaturePool(Arena.attach(wiring.arena, lock_timeout_s=SCHEDULER_LOCK_S))


def open_store(wiring: StageWiring) -> FeaturePool:
    """Attaches the arena, and connects to the second tier in the background where the wiring names one."""
    if not wiring.mooncake_master:
        return open_pool(arena=wiring.arena, spare_s=SPARE_S)
    config = MooncakeConfig(
        master=wiring.mooncake_master,
        host=wiring.host,
        protocol=wiring.mooncake_protocol,
        segment_bytes=wiring.mooncake_segment_bytes,
        **(on_device(memory_here("npu")) if wiring.mooncake_protocol == ASCEND else {}),
    )
    return open_pool(arena=wiring.arena, mooncake=config, spare_s=SPARE_S)


def on_device(memory: DeviceMemory, gate: CaptureGate = capture_gate) -> dict[str, Any]:
    """What `MooncakeConfig` needs where Mooncake's transport belongs to a device: threads that have set it, once no
    graph is being captured any more, and page-locked host memory of its own, aligned as the strictest wants it."""

    def begin_thread() -> None:
        if not gate.passed(CAPTURES_S):
            raise StoreUnavailableError("the worker still captures graphs")
        memory.enter_thread()

    def host_memory(nbytes: int) -> Bytes:
        raw = memory.host_buffer(nbytes + memory.alignment)
        return raw[-raw.data_ptr() % memory.alignment :][:nbytes].numpy()

    return {"begin_thread": begin_thread, "host_memory": host_memory}


def open_reader(wiring: StageWiring, device: torch.device | str) -> ArenaReader:
    """What a worker of a consumer loads features with. Called by the model's thread."""
    return ArenaReader(Arena.attach(wiring.arena), memory_here(torch.device(device).type), owned=True)


def remote_counters(pool: FeaturePool) -> dict[str, int]:
    """What this process did with the second tier, as a `StoreReport` counts it; nothing where there is none."""
    return {f"pool.{name}": count for name, count in pool.counts().items() if count}


class ArenaReader:
    """Reads from the arena, through the host. Whoever made the arena closes it, unless `owned`."""

    def __init__(self, arena: Arena, memory: DeviceMemory, *, owned: bool = False) -> None:
        self._arena, self._memory, self._owned = arena, memory, owned

    def read(self, slot: FeatureSlot) -> torch.Tensor:
        """A copy of a pinned feature, on the model's device. Called by the model's thread."""
        host = self._memory.host_buffer(slot.nbytes)
        self._arena.copy_pinned(slot.key, slot.slot, slot.offset, host.numpy())
        return self._memory.to_device(host).view(getattr(torch, slot.dtype)).view(slot.shape)

    def close(self) -> None:
        if self._owned:
            self._arena.close()


def load(reader: ArenaReader, slots: Iterable[FeatureSlot], cache: dict[str, torch.Tensor]) -> Iterator[FeatureSlot]:
    """Copies what the cache lacks; yields the slots it copied from."""
    for slot in slots:
        if slot.key not in cache:
            cache[slot.key] = reader.read(slot)
            yield slot
