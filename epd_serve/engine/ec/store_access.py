"""How a stage gets to the MM Store: the one place that turns its wiring into a pool."""

from __future__ import annotations

from epd_serve.wiring import StageWiring
from store.feature_pool import FeaturePool
from store.mooncake_client import MooncakeConfig
from store.open_pool import open_pool


def open_store(wiring: StageWiring, *, local_only: bool = False) -> FeaturePool:
    """Attaches the arena, and connects to the second tier in the background where the wiring names one.

    Args:
        local_only: for the side of a stage that never leaves its host.
    """
    if local_only or not wiring.mooncake_master:
        return open_pool(arena=wiring.arena)
    return open_pool(
        arena=wiring.arena,
        mooncake=MooncakeConfig(
            master=wiring.mooncake_master,
            host=wiring.host,
            protocol=wiring.mooncake_protocol,
            segment_bytes=wiring.mooncake_segment_bytes,
        ),
    )


def remote_counters(pool: FeaturePool) -> dict[str, int]:
    """What this process did with the second tier, as a `StoreReport` counts it; nothing where there is none."""
    return {f"pool.{name}": count for name, count in pool.remote_counts().items() if count}
