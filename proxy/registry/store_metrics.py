"""The stages' reports about the MM Store as Prometheus metrics, read from the status table at every scrape."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from proxy.registry.table import InstanceTable

GAUGES = {
    "capacity_bytes": "Room of the instance's arena.",
    "used_bytes": "Bytes of features in the instance's arena.",
    "leased": "Features of the arena that are in use.",
    "waiting_puts": "Features of the instance that wait for room.",
    "encoding": "Items that the instance holds to encode.",
}


class StoreMetrics(Collector):
    """`epd_store_*` by instance; nothing for an instance that has not reported."""

    def __init__(self, table: InstanceTable) -> None:
        self._table = table

    def collect(self) -> Iterator[Metric]:
        reports = [view.report for view in self._table.snapshot() if view.report is not None]
        for name, text in GAUGES.items():
            gauge = GaugeMetricFamily(f"epd_store_{name}", text, labels=("instance",))
            for report in reports:
                gauge.add_metric((report.instance,), getattr(report, name))
            yield gauge
        pool = GaugeMetricFamily(
            "epd_store_pool",
            "1 for the state of the second tier as the instance sees it.",
            labels=("instance", "state"),
        )
        events = CounterMetricFamily(
            "epd_store_events", "What the instance counts, in this life of it.", labels=("instance", "event")
        )
        for report in reports:
            pool.add_metric((report.instance, report.pool), 1)
            for event, count in sorted(report.counters.items()):
                events.add_metric((report.instance, event), count)
        yield pool
        yield events
