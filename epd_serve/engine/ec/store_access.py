"""How a stage gets to the MM Store: the one place that turns its wiring into a pool, and what it reports of one."""

from __future__ import annotations

from typing import Any

from epd_serve import wire
from epd_serve.engine.capture_gate import CaptureGate, capture_gate
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
"""What was stored or looked at within that time is not evicted, unless it has served a request since: an encoder with
much to say waits for whoever needs it, for a moment, and what is used again and again stays (`features.py`)."""


def open_local_store(wiring: StageWiring) -> FeaturePool:
    """The arena alone, for a scheduler's own thread: no call waits longer than `SCHEDULER_LOCK_S` for its index."""
    return FeaturePool(Arena.attach(wiring.arena, lock_timeout_s=SCHEDULER_LOCK_S))


def open_store(wiring: StageWiring) -> FeaturePool:
    """Attaches the arena, and connects to the second tier in the background where the wiring names one."""
    config = None
    if wiring.mooncake_master:
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


def store_report(
    wiring: StageWiring, pool: FeaturePool, counters: dict[str, int], *, waiting_puts: int, encoding: int = 0
) -> wire.StoreReport:
    """What this process sees of the store, and what it has done with it (`counters`).

    Raises:
        StoreError: the arena does not answer.
    """
    stats = pool.arena.stats()
    return wire.StoreReport(
        wiring.instance,
        wiring.incarnation,
        stats.capacity_bytes,
        stats.used_bytes,
        stats.leased,
        pool=pool.state,
        waiting_puts=waiting_puts,
        encoding=encoding,
        counters=counters,
    )
