"""The stages' reports about their load as Prometheus metrics, read from the status table at every scrape."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from proxy.registry.instance_state import REPORT_TRUST_S
from proxy.registry.table import InstanceTable

GAUGES = {
    "waiting": "Requests that wait in the instance's scheduler.",
    "running": "Requests that the instance runs.",
    "pending_prompt_tokens": "Prompt tokens that the instance has still to compute.",
    "pending_item_tokens": "Tokens of media items that the instance has still to encode.",
    "kv_used": "Fraction of the instance's KV cache in use.",
    "step_s": "Mean seconds of a recent step.",
    "prompt_tokens_per_s": "Prompt tokens computed per second of busy time, lately.",
    "item_tokens_per_s": "Item tokens encoded per second of busy time, lately.",
    "decode_tokens_per_s": "Tokens generated per second and running request, lately.",
}


class StageMetrics(Collector):
    """`epd_stage_*` by instance and role; nothing for an instance that has not reported lately."""

    def __init__(self, table: InstanceTable) -> None:
        self._table = table

    def collect(self) -> Iterator[Metric]:
        labels = ("instance", "role")
        views = self._table.snapshot()
        up = GaugeMetricFamily("epd_stage_up", "1 while the instance gets requests.", labels=labels)
        load = GaugeMetricFamily("epd_stage_load", "Pending work, in the unit of the role.", labels=labels)
        for view in views:
            up.add_metric((view.instance.id, view.instance.role.value), view.up)
            load.add_metric((view.instance.id, view.instance.role.value), view.load)
        yield up
        yield load
        for name, text in GAUGES.items():
            gauge = GaugeMetricFamily(f"epd_stage_{name}", text, labels=labels)
            for view in views:
                if view.stage is not None and view.stage_age_s < REPORT_TRUST_S:
                    gauge.add_metric((view.instance.id, view.instance.role.value), getattr(view.stage, name))
            yield gauge
