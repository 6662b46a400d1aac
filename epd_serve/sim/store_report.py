"""The `StoreReport` of a simulated stage."""

from __future__ import annotations

from epd_serve.wire import StoreReport
from epd_serve.wiring import StageWiring
from store.interface import FeatureStore


def store_report(
    wiring: StageWiring,
    store: FeatureStore | None,
    *,
    seq: int,
    counters: dict[str, int],
    waiting_puts: int = 0,
    encoding: int = 0,
) -> StoreReport:
    """What this instance sees of the store now."""
    stats = store.stats() if store is not None else None
    return StoreReport(
        instance=wiring.instance,
        incarnation=wiring.incarnation,
        capacity_bytes=stats.capacity_bytes if stats else 0,
        used_bytes=stats.used_bytes if stats else 0,
        leased=stats.leased if stats else 0,
        pool="up" if wiring.mooncake_master else "none",
        waiting_puts=waiting_puts,
        encoding=encoding,
        counters=counters,
        seq=seq,
    )
