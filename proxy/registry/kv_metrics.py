"""The stages' reports of their KV links as Prometheus metrics, read from the status table at every scrape.

What a link has counted ends with its worker's life: a stage that is gone, or has fallen silent, has no series.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from proxy.registry.kv_links import LinkView, link_views
from proxy.registry.table import InstanceTable

LABELS = ("instance", "rank", "peer", "peer_rank", "transport")
"""`rank` of the sending worker, `peer_rank` of the receiving one; `transport` is empty while the link is not up."""

COUNTERS = {
    "bytes": ("bytes", "Bytes of KV sent."),
    "packets": ("packets", "Packets sent."),
    "layers": ("layers", "Layers in packets sent; by packets, the mean group size."),
    "retries": ("retries", "Connections made again after a failure."),
    "busy_seconds": ("busy_s", "Time spent moving packets."),
    "exposed_seconds": ("exposed_s", "From the end of a prompt's prefill to the end of its transfer, summed."),
    "transfer_seconds": ("transfer_s", "Time that the packets of a transfer took, summed over transfers."),
}
OUTCOMES = {"ok": "transfers", "failed": "failed", "cancelled": "cancelled"}


class KvMetrics(Collector):
    """`epd_kv_*` by link, nothing for an instance that reports none."""

    def __init__(self, table: InstanceTable) -> None:
        self._table = table

    def collect(self) -> Iterator[Metric]:
        views = self._table.snapshot()
        links = list(link_views(views))
        for name, (field, text) in COUNTERS.items():
            counter = CounterMetricFamily(f"epd_kv_{name}", text, labels=LABELS)
            for one in links:
                counter.add_metric(_labels(one), getattr(one.link, field))
            yield counter
        transfers = CounterMetricFamily("epd_kv_transfers", "Transfers ended.", labels=(*LABELS, "outcome"))
        up = GaugeMetricFamily("epd_kv_link_up", "1 while packets can travel.", labels=LABELS)
        queued = GaugeMetricFamily("epd_kv_queued_bytes", "Packets that wait for the link.", labels=LABELS)
        setup = GaugeMetricFamily("epd_kv_setup_seconds", "Time of a packet besides that of its bytes.", labels=LABELS)
        bandwidth = GaugeMetricFamily(
            "epd_kv_bandwidth_bytes_per_second", "What the link has been measured to carry.", labels=LABELS
        )
        for one in links:
            labels, link = _labels(one), one.link
            for outcome, field in OUTCOMES.items():
                transfers.add_metric((*labels, outcome), getattr(link, field))
            up.add_metric(labels, link.state == "up")
            queued.add_metric(labels, link.queued_bytes)
            if link.s_per_byte > 0:
                setup.add_metric(labels, link.setup_s)
                bandwidth.add_metric(labels, 1 / link.s_per_byte)
        yield from (transfers, up, queued, setup, bandwidth)
        layer = GaugeMetricFamily(
            "epd_kv_layer_seconds",
            "Compute time per layer of the last measured step.",
            labels=("instance", "rank", "grouping"),
        )
        for view in views:
            for report in view.kv:
                layer.add_metric((view.instance.id, str(report.rank), report.grouping), report.layer_s)
        yield layer


def _labels(one: LinkView) -> tuple[str, ...]:
    return (one.sender, str(one.rank), one.peer, str(one.link.rank), one.link.transport)
