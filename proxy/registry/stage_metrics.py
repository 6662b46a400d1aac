"""What the stages report, as others see it: KV links as rows, and everything as Prometheus metrics, read from the
status table at every scrape.

Figures of a link are means since the start of the sending worker. Rates over a time are for whoever reads the counters
twice. What a link has counted ends with its worker: a stage that is gone, or has fallen silent, has no series.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from epd_serve.wire import KvLink
from proxy.registry.instance_state import REPORT_TRUST_S, InstanceView, leads_to
from proxy.registry.table import InstanceTable

# --- KV links -------------------------------------------------------------------------------------------------------

SHOWN = (
    "state", "reason", "transport", "transfers", "failed", "cancelled", "retries", "packets", "bytes", "queued_bytes",
)  # fmt: skip
"""Fields of a link that `/instances` shows as they are."""


class LinkView(NamedTuple):
    """One link. `rank`: of the sender's worker. `peer`: instance that it leads to, or its address if nobody has it."""

    sender: str
    rank: int
    peer: str
    link: KvLink


def link_views(views: Sequence[InstanceView]) -> Iterator[LinkView]:
    """All links that are reported, peers by their names."""
    for view in views:
        for report in view.kv:
            for link in report.links:
                names = (other.instance.id for other in views if leads_to(link, other.instance))
                yield LinkView(view.instance.id, report.rank, next(names, link.peer), link)


def link_fields(one: LinkView) -> dict[str, Any]:
    """A link as `/instances` shows it; a figure is None while there is nothing to take it of. `layers_per_packet`: the
    mean g. `gb_per_s`: while packets moved. `exposed_ms`: per transfer, from the end of its prefill to DONE. `overlap`:
    1 - exposed / transfer time; 0 where transfers waited for longer than their packets took."""
    link = one.link
    return {
        "rank": one.rank,
        "peer": one.peer,
        "peer_rank": link.rank,
        **{name: getattr(link, name) for name in SHOWN},
        "layers_per_packet": _ratio(link.layers, link.packets, 2),
        "gb_per_s": _ratio(link.bytes / 1e9, link.busy_s, 3),
        "exposed_ms": _ratio(link.exposed_s * 1e3, link.transfers, 3),
        "overlap": _ratio(max(0.0, link.transfer_s - link.exposed_s), link.transfer_s, 4),
    }


def _ratio(amount: float, of: float, digits: int) -> float | None:
    return round(amount / of, digits) if of > 0 else None


# --- metrics --------------------------------------------------------------------------------------------------------

STATE_GAUGES = {
    "up": "1 while the instance gets requests.",
    "draining": "1 while the instance is given nothing new, because it is to end.",
    "load": "Pending work: item tokens (E), prompt tokens (P, EP; PD and EPD count 1 more per running request), "
    "requests (D).",
    "pending_s": "For how long the instance keeps its device busy at its measured speed; infinite while answers run.",
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
STORE_GAUGES = {
    "capacity_bytes": "Room of the instance's arena.",
    "used_bytes": "Bytes of features in the instance's arena.",
    "leased": "Features of the arena that are in use.",
    "waiting_puts": "Features of the instance that wait for room.",
    "encoding": "Items that the instance holds to encode.",
}
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

Samples = Iterable[tuple[tuple[str, ...], float]]
"""Values of the labels, and of the metric."""

Source = Callable[[InstanceTable, Sequence[InstanceView]], Iterator[Metric]]


def stage_metrics(table: InstanceTable, views: Sequence[InstanceView]) -> Iterator[Metric]:
    """`epd_stage_*` by instance and role; of its load nothing for an instance that has not reported lately."""
    labels = ("instance", "role")
    named = [((view.instance.id, view.instance.role.value), view) for view in views]
    yield _gauge(
        "epd_stage_info",
        "1: where an instance is, on which devices of that node.",
        (*labels, "node", "devices"),
        [((*names, view.instance.node, ",".join(map(str, view.instance.devices))), 1) for names, view in named],
    )
    yield _gauge(
        "epd_stage_in_flight",
        "Requests that front doors wait for there, by work.",
        (*labels, "work"),
        [((*names, work.value), count) for names, view in named for work, count in view.in_flight.items()],
    )
    cached = [(names, table.prefixes.held_by(view.instance.incarnation_id)) for names, view in named]
    yield _gauge(
        "epd_stage_cached_tokens",
        "Tokens whose KV the instance has in its prefix cache, as it says.",
        labels,
        [(names, tokens) for names, tokens in cached if tokens is not None],
    )
    for name, text in STATE_GAUGES.items():
        yield _gauge(f"epd_stage_{name}", text, labels, [(names, getattr(view, name)) for names, view in named])
    fresh = [(names, view.stage) for names, view in named if view.stage and view.stage_age_s < REPORT_TRUST_S]
    up = {view.instance.id for view in views if view.up}
    held: dict[str, list[int]] = {}
    for (name, role), report in fresh:
        if name in up:
            held.setdefault(role, []).append(report.running + report.waiting)
    yield _gauge(
        "epd_stage_spread",
        "Requests that run or wait at the fullest instance of a role beyond those at the emptiest, as they report.",
        ("role",),
        [((role,), max(counts) - min(counts)) for role, counts in held.items()],
    )
    for name, text in LOAD_GAUGES.items():
        yield _gauge(f"epd_stage_{name}", text, labels, [(names, getattr(report, name)) for names, report in fresh])


def store_metrics(_: InstanceTable, views: Sequence[InstanceView]) -> Iterator[Metric]:
    """`epd_store_*` by instance; nothing for an instance that has not reported."""
    reports = [view.report for view in views if view.report is not None]
    for name, text in STORE_GAUGES.items():
        samples = [((report.instance,), getattr(report, name)) for report in reports]
        yield _gauge(f"epd_store_{name}", text, ("instance",), samples)
    yield _gauge(
        "epd_store_pool",
        "1 for the state of the second tier as the instance sees it.",
        ("instance", "state"),
        [((report.instance, report.pool), 1) for report in reports],
    )
    yield _counter(
        "epd_store_events",
        "What became of features, by event, in this life of the instance; the guide on monitoring lists events.",
        ("instance", "event"),
        [((one.instance, event), count) for one in reports for event, count in sorted(one.counters.items())],
    )


def kv_metrics(_: InstanceTable, views: Sequence[InstanceView]) -> Iterator[Metric]:
    """`epd_kv_*` by link, nothing for an instance that reports none.

    What a link has counted ends with its worker: a stage that is gone, or has fallen silent, has no series.
    """
    links = [
        ((one.sender, str(one.rank), one.peer, str(one.link.rank), one.link.transport), one.link)
        for one in link_views(views)
    ]
    for name, (field, text) in LINK_COUNTERS.items():
        yield _counter(f"epd_kv_{name}", text, LINK_LABELS, [(names, getattr(link, field)) for names, link in links])
    yield _counter(
        "epd_kv_transfers",
        "Transfers ended.",
        (*LINK_LABELS, "outcome"),
        [((*names, what), getattr(link, field)) for names, link in links for what, field in TRANSFER_OUTCOMES.items()],
    )
    up = [(names, link.state == "up") for names, link in links]
    yield _gauge("epd_kv_link_up", "1 while packets can travel.", LINK_LABELS, up)
    queued = [(names, link.queued_bytes) for names, link in links]
    yield _gauge("epd_kv_queued_bytes", "Packets that wait for the link.", LINK_LABELS, queued)
    measured = [(names, link) for names, link in links if link.s_per_byte > 0]
    yield _gauge(
        "epd_kv_setup_seconds",
        "Time of a packet besides that of its bytes.",
        LINK_LABELS,
        [(names, link.setup_s) for names, link in measured],
    )
    yield _gauge(
        "epd_kv_bandwidth_bytes_per_second",
        "What the link has been measured to carry.",
        LINK_LABELS,
        [(names, 1 / link.s_per_byte) for names, link in measured],
    )
    yield _gauge(
        "epd_kv_layer_seconds",
        "Compute time per layer of the last measured step.",
        ("instance", "rank", "grouping"),
        [((one.instance, str(one.rank), one.grouping), one.layer_s) for view in views for one in view.kv],
    )


class StageMetrics(Collector):
    """What some of the functions above read from the table."""

    def __init__(self, table: InstanceTable, *sources: Source) -> None:
        self._table = table
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        views = self._table.snapshot()
        for source in self._sources:
            yield from source(self._table, views)


def register_stage_metrics(registry: CollectorRegistry, table: InstanceTable) -> None:
    """Have `registry` collect all of these from `table`."""
    registry.register(StageMetrics(table, store_metrics, stage_metrics, kv_metrics))


def _gauge(name: str, text: str, labels: Sequence[str], samples: Samples) -> Metric:
    return _filled(GaugeMetricFamily(name, text, labels=labels), samples)


def _counter(name: str, text: str, labels: Sequence[str], samples: Samples) -> Metric:
    return _filled(CounterMetricFamily(name, text, labels=labels), samples)


def _filled(metric: GaugeMetricFamily | CounterMetricFamily, samples: Samples) -> Metric:
    for names, value in samples:
        metric.add_metric(names, value)
    return metric
