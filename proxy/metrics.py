"""The proxy's own Prometheus metrics; the stages have theirs. One registry per app, so that tests can hold many."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

MAX_CAUSES = 32
"""Distinct causes that are told apart; reasons are stages' sentences, of which there are few."""
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)
"""Ends of buckets; 2 s is the usual objective for a first token."""
CANCELLED = "cancelled"


class Count:
    """One series of a counter."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0.0

    def inc(self, count: float = 1.0) -> None:
        self.count += count


class LabelledCounter(Collector):
    """A counter by labels, for what every request adds to. Of the event loop alone: prometheus_client's own lock at
    every addition, which costs more than all that is noted of a request."""

    def __init__(
        self, name: str, help: str, labels: Sequence[str], *, registry: CollectorRegistry | None = None
    ) -> None:
        self._named = name, help, labels
        self._series: dict[tuple[str, ...], Count] = {}
        if registry is not None:
            registry.register(self)

    def labels(self, *values: str) -> Count:
        """The series with these values, given in order."""
        series = self._series.get(values)
        if series is None:
            series = self._series[values] = Count()
        return series

    def collect(self) -> Iterator[Metric]:
        name, help, labels = self._named
        family = CounterMetricFamily(name, help, labels=labels)
        for values, series in self._series.items():
            family.add_metric(values, series.count)
        yield family


class Times:
    """One series of a histogram. `counts`: within each bound and beyond the one before; the last, of what is longer."""

    __slots__ = ("bounds", "counts", "sum_s")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum_s += seconds


class LabelledHistogram(Collector):
    """A histogram by labels, as `LabelledCounter`."""

    def __init__(
        self,
        name: str,
        help: str,
        labels: Sequence[str],
        *,
        buckets: Sequence[float] = SECONDS,
        registry: CollectorRegistry | None = None,
    ) -> None:
        self._named = name, help, labels
        self._bounds = buckets
        self._series: dict[tuple[str, ...], Times] = {}
        if registry is not None:
            registry.register(self)

    def labels(self, *values: str) -> Times:
        """The series with these values, given in order."""
        series = self._series.get(values)
        if series is None:
            series = self._series[values] = Times(self._bounds)
        return series

    def collect(self) -> Iterator[Metric]:
        name, help, labels = self._named
        family = HistogramMetricFamily(name, help, labels=labels)
        ends = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        for values, series in self._series.items():
            until_now = accumulate(series.counts)
            family.add_metric(values, list(zip(ends, until_now, strict=True)), series.sum_s)
        yield family


class Metrics:
    """Of what happens while requests run. What they tell at their end is in `proxy/records/request_metrics.py`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.in_flight = Gauge("epd_proxy_in_flight", "Requests held now.", registry=self.registry)
        self.memory_held = Gauge(
            "epd_proxy_memory_held_bytes", "Bodies and media of the requests held now.", registry=self.registry
        )
        self.paths = LabelledCounter("epd_proxy_paths", "Attempts per path.", ("path",), registry=self.registry)
        self.prefix_tokens = LabelledCounter(
            "epd_proxy_prefix_tokens",
            "Prompt tokens of routed attempts: all, of beginnings whose blocks are known, and what prefill and decode "
            "have cached of those, as far as is known.",
            ("which",),
            registry=self.registry,
        )
        self.stage_seconds = LabelledHistogram(
            "epd_proxy_stage_seconds",
            "Time of one stage call as the proxy sees it.",
            ("stage", "outcome"),
            registry=self.registry,
        )
        self.first_tokens = LabelledCounter(
            "epd_proxy_first_tokens",
            "Streams by the role of the instance that their first token is from.",
            ("stage",),
            registry=self.registry,
        )
        self.retries = LabelledCounter(
            "epd_proxy_retries", "Attempts repeated after a stage failed.", ("stage",), registry=self.registry
        )
        self.retries_refused = Counter(
            "epd_proxy_retries_refused", "Retries that the retry budget did not allow.", registry=self.registry
        )
        self.migrations = LabelledCounter(
            "epd_proxy_migrations",
            "Streams that lost their instance, by how another one was to go on and whether it did.",
            ("way", "outcome"),
            registry=self.registry,
        )
        self.migration_gap_seconds = Histogram(
            "epd_proxy_migration_gap_seconds",
            "From a stream's last event of an instance that is gone to the first one of another that goes on.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.deaths = LabelledCounter(
            "epd_proxy_deaths", "Requests under which an instance died.", ("stage",), registry=self.registry
        )
        self.suspects = Gauge(
            "epd_proxy_suspects",
            "Request bodies that are suspected of the death of an instance, or refused for two.",
            ("state",),
            registry=self.registry,
        )
        self.poisonous = Counter(
            "epd_proxy_poisonous",
            "Times that a request body was found to kill instances and refused from then on.",
            registry=self.registry,
        )
        self.retry_budget = Gauge("epd_proxy_retry_budget", "Retries that may be made at once.", registry=self.registry)
        self.circuit_opened = LabelledCounter(
            "epd_proxy_circuit_opened",
            "Times that an instance was suspended for its failures.",
            ("instance",),
            registry=self.registry,
        )
        self.queue_seconds = LabelledHistogram(
            "epd_proxy_queue_seconds",
            "Time in a queue in front of the stages.",
            ("kind", "line"),
            registry=self.registry,
        )
        self.queue_waiting = Gauge(
            "epd_proxy_queue_waiting", "Requests with no place at any stage yet.", ("kind",), registry=self.registry
        )
        self.queue_served = Gauge(
            "epd_proxy_queue_served",
            "Requests with the stages that prefill and decode.",
            ("kind",),
            registry=self.registry,
        )
        self.queue_encoding = Gauge(
            "epd_proxy_queue_encoding", "Requests with a place at the encoders.", registry=self.registry
        )
        self.capacity = Gauge(
            "epd_proxy_capacity", "What may be with the stages at once.", ("of",), registry=self.registry
        )
        self.refused = LabelledCounter(
            "epd_proxy_refused", "Requests refused at the door, by reason.", ("reason",), registry=self.registry
        )
        self.fields_dropped = LabelledCounter(
            "epd_proxy_fields_dropped",
            "Fields of requests left out because vLLM has none of the name: where they stood, or which they were if "
            "another release or endpoint has them.",
            ("endpoint", "field"),
            registry=self.registry,
        )
        self.deadlines_lapsed = Counter(
            "epd_proxy_deadlines_lapsed",
            "Requests cancelled when their client's deadline lapsed.",
            registry=self.registry,
        )
        self.draining = Gauge("epd_proxy_draining", "1 once nothing new is accepted.", registry=self.registry)
        self.kv_failures = LabelledCounter(
            "epd_proxy_kv_failures",
            "Prompts whose KV did not reach the decode instance, by what the prefill instance says.",
            ("cause",),
            registry=self.registry,
        )
        self._kv_causes: set[str] = set()
        self.encode_fallback = LabelledCounter(
            "epd_proxy_encode_fallback",
            "Items sent on without an encoder; the prefilling stage encodes them.",
            ("reason",),
            registry=self.registry,
        )

        self.encode_skipped = Counter(
            "epd_proxy_encode_skipped", "Items not encoded because the store has them.", registry=self.registry
        )
        self.encode_coalesced = Counter(
            "epd_proxy_encode_coalesced", "Items that another request was having encoded.", registry=self.registry
        )
        self.encoded_again = Counter(
            "epd_proxy_encoded_again", "Items encoded again because they got lost.", registry=self.registry
        )
        self.store_waits = Counter(
            "epd_proxy_store_waits", "Waits because every encoder's store was full.", registry=self.registry
        )
        self.deliveries = LabelledCounter(
            "epd_proxy_deliveries", "Attempts by what stands for the media.", ("delivery",), registry=self.registry
        )
        self.went_ahead = LabelledCounter(
            "epd_proxy_went_ahead",
            "Attempts begun while encoders were still at work on the media, by what became of them.",
            ("outcome",),
            registry=self.registry,
        )
        self.step_downs = LabelledCounter(
            "epd_proxy_step_downs",
            "Attempts repeated with the media delivered otherwise, by the cause of the failure.",
            ("failed", "next", "cause"),
            registry=self.registry,
        )
        self.access_log_dropped = Counter(
            "epd_proxy_access_log_dropped",
            "Lines of the access log that were lost: its disk is full, or nobody reads it.",
            registry=self.registry,
        )
        self.recording_dropped = Counter(
            "epd_proxy_recording_dropped",
            "Requests that are missing in the recording: its disk is full, or too slow.",
            registry=self.registry,
        )
        self.traces_dropped = Counter(
            "epd_proxy_traces_dropped",
            "Requests whose OpenTelemetry spans were lost: the collector does not take them, or not as fast.",
            registry=self.registry,
        )
        self.announcements = LabelledCounter(
            "epd_proxy_announcements", "Announcements heard.", ("kind",), registry=self.registry
        )

    def kv_failed(self, reason: str) -> None:
        """Count a failure by its cause: the reason without what differs from one request to the next."""
        cause = re.sub("[0-9a-f]*[0-9][0-9a-f]*", "N", reason)[:100]
        if cause not in self._kv_causes and len(self._kv_causes) >= MAX_CAUSES:
            cause = "other"
        self._kv_causes.add(cause)
        self.kv_failures.labels(cause).inc()

    def migrated(self, way: str, gap_s: float) -> None:
        """A stream goes on."""
        self.migrations.labels(way, "went_on").inc()
        self.migration_gap_seconds.observe(gap_s)

    def text(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self.registry)
