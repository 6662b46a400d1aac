"""The proxy's own Prometheus metrics; the stages have theirs. One registry per app, so that tests can hold many."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

MAX_CAUSES = 32
"""Distinct causes that are told apart; reasons are stages' sentences, of which there are few."""
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)
"""Ends of buckets; 2 s is the usual objective for a first token."""
CANCELLED = "cancelled"
MAX_FEATURES, AGAIN_S = 8192, 30.0
"""Features of which it is remembered that they were announced, and for how long one is not to be made again."""


class LabelledCounter(Collector):
    """A counter by labels, for what every request adds to. Of the event loop alone: prometheus_client's own takes a
    lock at every addition, and with that three times as long.

    Attributes:
        counts: by the values of the labels, in order.
    """

    def __init__(
        self, name: str, help: str, labels: Sequence[str], *, registry: CollectorRegistry | None = None
    ) -> None:
        self._named = name, help, labels
        self._series: dict[tuple[str, ...], Series] = {}
        self.counts: dict[tuple[Any, ...], float] = defaultdict(float)
        if registry is not None:
            registry.register(self)

    def labels(self, *values: str) -> Series:
        """The series with these values, given in order."""
        series = self._series.get(values)
        if series is None:
            series = self._series[values] = Series(self, values)
        return series

    def observe(self, values: tuple[str, ...], seconds: float) -> None:
        """Only of a histogram."""
        raise NotImplementedError

    def collect(self) -> Iterator[Metric]:
        name, help, labels = self._named
        family = CounterMetricFamily(name, help, labels=labels)
        for values, count in self.counts.items():
            family.add_metric(values, count)
        yield family


class LabelledHistogram(LabelledCounter):
    """A histogram by labels, likewise. `counts`: by the values and, behind them, the bucket: of what is within a bound
    and beyond the one before.

    Args:
        buckets: bounds that are told. bounds: all, where more of them are counted.
    """

    def __init__(
        self,
        name: str,
        help: str,
        labels: Sequence[str],
        *,
        buckets: Sequence[float] = SECONDS,
        bounds: Sequence[float] = (),
        registry: CollectorRegistry | None = None,
    ) -> None:
        super().__init__(name, help, labels, registry=registry)
        self._told = {*buckets, math.inf}
        self._bounds = *(bounds or buckets), math.inf
        self._sums: dict[tuple[str, ...], float] = defaultdict(float)

    def observe(self, values: tuple[str, ...], seconds: float) -> None:
        self.counts[*values, bisect_left(self._bounds, seconds)] += 1
        self._sums[values] += seconds

    def collect(self) -> Iterator[Metric]:
        name, help, labels = self._named
        family = HistogramMetricFamily(name, help, labels=labels)
        for values, sum_s in self._sums.items():
            until_now = accumulate(self.counts.get((*values, at), 0) for at in range(len(self._bounds)))
            buckets = [
                ("+Inf" if bound == math.inf else str(float(bound)), count)
                for bound, count in zip(self._bounds, until_now, strict=True)
                if bound in self._told
            ]
            family.add_metric(values, buckets, sum_s)
        yield family


class Series(NamedTuple):
    """One series of a counter or a histogram."""

    family: LabelledCounter
    values: tuple[str, ...]

    def inc(self, count: float = 1.0) -> None:
        self.family.counts[self.values] += count

    def observe(self, seconds: float) -> None:
        self.family.observe(self.values, seconds)


class EncodedOnce(LabelledCounter):
    """Whether encoders are asked for a thing once, by what they announce and not by what was decided: `again` are
    features of media whose feature was announced shortly before and not lost since, under this key or another one.

    Known are the media that this process had encoded; of others' features the key stands for them.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        help = "Features that encoders announced: `again` where one of the same media was announced within 30 s before."
        super().__init__("epd_proxy_features_announced", help, ("of",), registry=registry)
        self._content_of: dict[str, int] = {}
        self._announced: dict[int | str, float] = {}

    def ordered(self, key: str, content: int) -> None:
        """An encoder is asked for this key, of media with this content."""
        self._content_of[key] = content
        if len(self._content_of) > MAX_FEATURES:
            del self._content_of[next(iter(self._content_of))]

    def announced(self, key: str, now: float) -> None:
        """An encoder has stored it."""
        content = self._content_of.get(key, key)
        before = self._announced.pop(content, None)
        self.labels("new" if before is None or now - before > AGAIN_S else "again").inc()
        self._announced[content] = now  # behind all others: the first is the oldest
        if len(self._announced) > MAX_FEATURES:
            del self._announced[next(iter(self._announced))]

    def lost(self, keys: Iterable[str]) -> None:
        """These are not there any more: whoever needs them has them encoded again."""
        for key in keys:
            self._announced.pop(self._content_of.get(key, key), None)


class Metrics:
    """Of what happens while requests run. What they tell at their end is in `proxy/records/counts.py`."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        counter, histogram = partial(LabelledCounter, registry=registry), partial(LabelledHistogram, registry=registry)
        plain, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        self.in_flight = gauge("epd_proxy_in_flight", "Requests held now.")
        self.memory_held = gauge("epd_proxy_memory_held_bytes", "Bodies and media of the requests held now.")
        self.paths = counter("epd_proxy_paths", "Attempts per path.", ("path",))
        self.prefix_tokens = counter(
            "epd_proxy_prefix_tokens",
            "Prompt tokens of routed attempts: all, of beginnings whose blocks are known, and what prefill and decode "
            "have cached of those, as far as is known.",
            ("which",),
        )
        self.stage_seconds = histogram(
            "epd_proxy_stage_seconds", "Time of one stage call as the proxy sees it.", ("stage", "outcome")
        )
        self.first_tokens = counter(
            "epd_proxy_first_tokens", "Streams by the role of the instance that their first token is from.", ("stage",)
        )
        self.first_token_streams = counter(
            "epd_proxy_first_token_streams",
            "Streams with a prefill and a decode instance, by what the latter said: `kept` goes on after the token of "
            "prefill, which was the client's first; `other` began with another one; `decode` gave the first itself.",
            ("outcome",),
        )
        self.retries = counter("epd_proxy_retries", "Attempts repeated after a stage failed.", ("stage",))
        self.retries_refused = plain("epd_proxy_retries_refused", "Retries that the retry budget did not allow.")
        self.migrations = counter(
            "epd_proxy_migrations",
            "Streams that lost their instance, by how another one was to go on and whether it did.",
            ("way", "outcome"),
        )
        self.migration_gap_seconds = Histogram(
            "epd_proxy_migration_gap_seconds",
            "From a stream's last event of an instance that is gone to the first one of another that goes on.",
            buckets=SECONDS,
            registry=registry,
        )
        self.deaths = counter("epd_proxy_deaths", "Requests under which an instance died.", ("stage",))
        self.suspects = gauge(
            "epd_proxy_suspects",
            "Request bodies that are suspected of the death of an instance, or refused for two.",
            ("state",),
        )
        self.poisonous = plain(
            "epd_proxy_poisonous", "Times that a request body was found to kill instances and refused from then on."
        )
        self.retry_budget = gauge("epd_proxy_retry_budget", "Retries that may be made at once.")
        self.circuit_opened = counter(
            "epd_proxy_circuit_opened", "Times that an instance was suspended for its failures.", ("instance",)
        )
        self.queue_seconds = histogram(
            "epd_proxy_queue_seconds", "Time in a queue in front of the stages.", ("kind", "line")
        )
        self.queue_waiting = gauge("epd_proxy_queue_waiting", "Requests with no place at any stage yet.", ("kind",))
        self.queue_served = gauge(
            "epd_proxy_queue_served", "Requests with the stages that prefill and decode.", ("kind",)
        )
        self.queue_encoding = gauge("epd_proxy_queue_encoding", "Requests with a place at the encoders.")
        self.queue_work_seconds = gauge(
            "epd_proxy_queue_work_seconds", "Work of those that wait, in predicted seconds of one instance.", ("line",)
        )
        self.queue_late = counter(
            "epd_proxy_queue_late",
            "Requests whose turn came when they could no longer keep their SLO for the first token.",
            ("line",),
        )
        self.queue_over_share = counter(
            "epd_proxy_queue_over_share",
            "Requests that came to a line while their account was over its share of the stages.",
            ("line",),
        )
        self.refused = counter("epd_proxy_refused", "Requests refused at the door, by reason.", ("reason",))
        self.fields_dropped = counter(
            "epd_proxy_fields_dropped",
            "Fields of requests left out because vLLM has none of the name: where they stood, or which they were if "
            "another release or endpoint has them.",
            ("endpoint", "field"),
        )
        self.deadlines_lapsed = plain(
            "epd_proxy_deadlines_lapsed", "Requests cancelled when their client's deadline lapsed."
        )
        self.draining = gauge("epd_proxy_draining", "1 once nothing new is accepted.")
        self.kv_failures = counter(
            "epd_proxy_kv_failures",
            "Prompts whose KV did not reach the decode instance, by what the prefill instance says.",
            ("cause",),
        )
        self.encode_fallback = counter(
            "epd_proxy_encode_fallback",
            "Items sent on without an encoder; the prefilling stage encodes them.",
            ("reason",),
        )

        self.encoded_once = EncodedOnce(registry)
        self.encode_skipped = plain("epd_proxy_encode_skipped", "Items not encoded because the store has them.")
        self.encode_coalesced = plain("epd_proxy_encode_coalesced", "Items that another request was having encoded.")
        self.image_parts = plain("epd_proxy_image_parts", "Parts of images that several encoders were to share.")
        self.encoded_again = plain("epd_proxy_encoded_again", "Items encoded again because they got lost.")
        self.store_waits = plain("epd_proxy_store_waits", "Waits because every encoder's store was full.")
        self.deliveries = counter("epd_proxy_deliveries", "Attempts by what stands for the media.", ("delivery",))
        self.went_ahead = counter(
            "epd_proxy_went_ahead",
            "Attempts begun while encoders were still at work on the media, by what became of them.",
            ("outcome",),
        )
        self.step_downs = counter(
            "epd_proxy_step_downs",
            "Attempts repeated with the media delivered otherwise, by the cause of the failure.",
            ("failed", "next", "cause"),
        )
        self.access_log_dropped = plain(
            "epd_proxy_access_log_dropped",
            "Lines of the access log that were lost: its disk is full, or nobody reads it.",
        )
        self.recording_dropped = plain(
            "epd_proxy_recording_dropped", "Requests that are missing in the recording: its disk is full, or too slow."
        )
        self.traces_dropped = plain(
            "epd_proxy_traces_dropped",
            "Requests whose OpenTelemetry spans were lost: the collector does not take them, or not as fast.",
        )
        self.announcements = counter("epd_proxy_announcements", "Announcements heard.", ("kind",))

    def kv_failed(self, reason: str) -> None:
        """Count a failure by its cause: the reason without what differs from one request to the next."""
        cause = re.sub("[0-9a-f]*[0-9][0-9a-f]*", "N", reason)[:100]
        known = self.kv_failures.counts
        if (cause,) not in known and len(known) >= MAX_CAUSES:
            cause = "other"
        self.kv_failures.labels(cause).inc()

    def migrated(self, way: str, gap_s: float) -> None:
        """A stream goes on."""
        self.migrations.labels(way, "went_on").inc()
        self.migration_gap_seconds.observe(gap_s)

    def text(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self.registry)
