"""Counts of several proxy processes added up."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from proxy.metrics import Metrics
from proxy.records.counts import RequestCounts
from proxy.records.record import Record
from proxy.workers.metrics_aggregation import COUNTED_PREFIX, exposition, lasting, own_counts, summed


def registry(requests: int, held: int, seconds: float) -> CollectorRegistry:
    own_registry = CollectorRegistry()
    Counter("epd_proxy_requests", "Ended.", ("status",), registry=own_registry).labels("200").inc(requests)
    Gauge("epd_proxy_in_flight", "Held.", registry=own_registry).set(held)
    Histogram("epd_proxy_ttft_seconds", "TTFT.", buckets=(1, 2), registry=own_registry).observe(seconds)
    Gauge("epd_store_leased", "As the table says.", registry=own_registry).set(7)
    return own_registry


def samples(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(text.decode())
    return {
        (sample.name, tuple(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_counts_are_added_and_what_the_table_says_is_said_once() -> None:
    one, other = registry(3, 1, 0.5), registry(4, 2, 1.5)
    link_fields = samples(exposition(one, summed([own_counts(one), own_counts(other)])))
    assert link_fields["epd_proxy_requests_total", (("status", "200"),)] == 7
    assert link_fields["epd_proxy_in_flight", ()] == 3
    assert link_fields["epd_proxy_ttft_seconds_bucket", (("le", "1.0"),)] == 1
    assert link_fields["epd_proxy_ttft_seconds_bucket", (("le", "+Inf"),)] == 2
    assert link_fields["epd_proxy_ttft_seconds_sum", ()] == 2.0
    assert link_fields["epd_store_leased", ()] == 7


def test_of_one_process_the_text_is_what_it_would_say_alone() -> None:
    metrics, requests = Metrics(), RequestCounts(0.0)
    metrics.registry.register(requests)
    requests.ended(Record("r", "/v1/completions", outcome="200", status=200, first_byte_s=0.2, total_s=1.0))
    together = exposition(metrics.registry, summed([own_counts(metrics.registry)]))
    assert samples(together) == samples(metrics.text())


def test_a_process_that_has_ended_leaves_what_it_did_and_not_what_it_held() -> None:
    names = {family.name for family in lasting(own_counts(registry(3, 1, 0.5)))}
    assert names == {"epd_proxy_requests", "epd_proxy_ttft_seconds"}


def test_creation_times_are_the_earliest() -> None:
    one, other = own_counts(registry(1, 0, 0.5)), own_counts(registry(1, 0, 0.5))
    times = [
        value for family in (*one, *other) for name, _, value in family.samples if name == "epd_proxy_requests_created"
    ]
    (together,) = [
        value
        for family in summed([one, other])
        for name, _, value in family.samples
        if name == "epd_proxy_requests_created"
    ]
    assert together == min(times)


def test_everything_that_the_proxy_itself_counts_is_named_so() -> None:
    metrics = Metrics()
    families = [*metrics.registry.collect(), *RequestCounts(0.0).collect()]
    assert all(family.name.startswith(COUNTED_PREFIX) for family in families)
