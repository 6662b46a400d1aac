"""What the stages report as Prometheus metrics, read from the status table at every scrape: load, store, KV links."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from proxy.registry.instance_state import REPORT_TRUST_S, InstanceView
from proxy.registry.kv_links import LinkView, link_views
from proxy.registry.table import InstanceTable

STATE_GAUGES: Mapping[str, tuple[str, Callable[[InstanceView], float]]] = {
    "up": ("1 while the instance gets requests.", lambda view: view.up),
    "draining": ("1 while the instance is given nothing new, because it is to end.", lambda view: view.draining),
    "load": (
        "Pending work: item tokens (E), prompt tokens (P, EP; PD and EPD count 1 more per running request), requests "
        "(D).",
        lambda view: view.load,
    ),
    "pending_s": (
        "For how long the instance keeps its device busy at its measured speed; infinite while answers run.",
        lambda view: view.pending_s,
    ),
}
LOAD_GAUGES = {
    "waiting": "Requests that wait in the instance's scheduler.",
    "running": "Requests that the instance runs.",
    "pending_prompt_tokens": "Prompt tokens that the instance has still to compute.",
    "pending_item_tokens": "Tokens of media items that the instance has still to encode.",
    "kv_used": "Fraction of the instance's KV cache in use.",
    "step_s": "Mean seconds of a recent step.",
    "prompt_tokens_per_s": "Prompt tokens computed per second of busy time, lately.",
    "item_tokens_per_s": "Item tokens encoded per second of busy time, lately.",
    "decode_tokens_per_s": "Tokens generated per second and running request, lately.",
    "decode_step_s": "Seconds of a recent step with decodes; 0 where nothing decodes, or no SLO is named.",
    "token_budget": "Prompt tokens that the last step was let have; 0 where no SLO is named.",
    "item_budget": "Tokens of media items that the last step was let have; 0 where no SLO is named.",
    "held_steps": "Steps so far whose budget left something for the next ones.",
}


class StageMetrics(Collector):
    """`epd_stage_*` by instance and role; of its load nothing for an instance that has not reported lately."""

    def __init__(self, table: InstanceTable) -> None:
        self._table = table

    def collect(self) -> Iterator[Metric]:
        labels = ("instance", "role")
        views = [((view.instance.id, view.instance.role.value), view) for view in self._table.snapshot()]
        info = GaugeMetricFamily(
            "epd_stage_info",
            "1: where an instance is, on which devices of that node.",
            labels=(*labels, "node", "devices"),
        )
        in_flight = GaugeMetricFamily(
            "epd_stage_in_flight", "Requests that front doors wait for there, by work.", labels=(*labels, "work")
        )
        for named, view in views:
            devices = ",".join(map(str, view.instance.devices))
            info.add_metric((*named, view.instance.node, devices), 1)
            for work, count in view.in_flight.items():
                in_flight.add_metric((*named, work.value), count)
        yield info
        yield in_flight
        cached = GaugeMetricFamily(
            "epd_stage_cached_tokens",
            "Tokens whose KV the instance has in its prefix cache, as it says.",
            labels=labels,
        )
        for named, view in views:
            if (tokens := self._table.prefixes.held_by(view.instance.incarnation_id)) is not None:
                cached.add_metric(named, tokens)
        yield cached
        for name, (text, value) in STATE_GAUGES.items():
            gauge = GaugeMetricFamily(f"epd_stage_{name}", text, labels=labels)
            for named, view in views:
                gauge.add_metric(named, value(view))
            yield gauge
        spread = GaugeMetricFamily(
            "epd_stage_spread",
            "Requests that run or wait at the fullest instance of a role beyond those at the emptiest, as they report.",
            labels=("role",),
        )
        held: dict[str, list[int]] = {}
        for (_, role), view in views:
            if view.up and view.stage is not None and view.stage_age_s < REPORT_TRUST_S:
                held.setdefault(role, []).append(view.stage.running + view.stage.waiting)
        for role, counts in held.items():
            spread.add_metric((role,), max(counts) - min(counts))
        yield spread
        for name, text in LOAD_GAUGES.items():
            gauge = GaugeMetricFamily(f"epd_stage_{name}", text, labels=labels)
            for named, view in views:
                if view.stage is not None and view.stage_age_s < REPORT_TRUST_S:
                    gauge.add_metric(named, getattr(view.stage, name))
            yield gauge


STORE_GAUGES = {
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
        for name, text in STORE_GAUGES.items():
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
            "epd_store_events",
            "What became of features, by event, in this life of the instance; the guide on monitoring lists events.",
            labels=("instance", "event"),
        )
        for report in reports:
            pool.add_metric((report.instance, report.pool), 1)
            for event, count in sorted(report.counters.items()):
                events.add_metric((report.instance, event), count)
        yield pool
        yield events


LINK_LABELS = ("instance", "rank", "peer", "peer_rank", "transport")
"""`rank` of the sending worker, `peer_rank` of the receiving one; `transport` is empty while the link is not up."""

LINK_COUNTERS = {
    "bytes": ("bytes", "Bytes of KV sent."),
    "packets": ("packets", "Packets sent."),
    "layers": ("layers", "Layers in packets sent; by packets, the mean group size."),
    "retries": ("retries", "Connections made again after a failure."),
    "busy_seconds": ("busy_s", "Time spent moving packets."),
    "exposed_seconds": ("exposed_s", "From the end of a prompt's prefill to the end of its transfer, summed."),
    "transfer_seconds": ("transfer_s", "Time that the packets of a transfer took, summed over transfers."),
}
TRANSFER_OUTCOMES = {"ok": "transfers", "failed": "failed", "cancelled": "cancelled"}


class KvMetrics(Collector):
    """`epd_kv_*` by link, nothing for an instance that reports none.

    What a link has counted ends with its worker: a stage that is gone, or has fallen silent, has no series.
    """

    def __init__(self, table: InstanceTable) -> None:
        self._table = table

    def collect(self) -> Iterator[Metric]:
        views = self._table.snapshot()
        links = list(link_views(views))
        for name, (field, text) in LINK_COUNTERS.items():
            counter = CounterMetricFamily(f"epd_kv_{name}", text, labels=LINK_LABELS)
            for one in links:
                counter.add_metric(_labels(one), getattr(one.link, field))
            yield counter
        transfers = CounterMetricFamily("epd_kv_transfers", "Transfers ended.", labels=(*LINK_LABELS, "outcome"))
        up = GaugeMetricFamily("epd_kv_link_up", "1 while packets can travel.", labels=LINK_LABELS)
        queued = GaugeMetricFamily("epd_kv_queued_bytes", "Packets that wait for the link.", labels=LINK_LABELS)
        setup = GaugeMetricFamily(
            "epd_kv_setup_seconds", "Time of a packet besides that of its bytes.", labels=LINK_LABELS
        )
        bandwidth = GaugeMetricFamily(
            "epd_kv_bandwidth_bytes_per_second", "What the link has been measured to carry.", labels=LINK_LABELS
        )
        for one in links:
            labels, link = _labels(one), one.link
            for outcome, field in TRANSFER_OUTCOMES.items():
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


def register_stage_metrics(registry: CollectorRegistry, table: InstanceTable) -> None:
    """Have `registry` collect all of these from `table`."""
    for collector in (StoreMetrics(table), StageMetrics(table), KvMetrics(table)):
        registry.register(collector)
