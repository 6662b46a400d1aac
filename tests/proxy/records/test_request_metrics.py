"""What Prometheus is told of requests that have ended."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from proxy.records import request_metrics
from proxy.records.record import Record
from proxy.records.request_metrics import RequestMetrics
from tests.proxy.fakes import DONE, chunk, cluster, encodes, image_body, opening, replies, settings, streams, text_body

CHAT = "/v1/chat/completions"


class Told:
    """What a scrape says after these records have ended."""

    def __init__(self, *records: Record) -> None:
        self.registry, metrics = CollectorRegistry(), RequestMetrics()
        self.registry.register(metrics)
        for record in records:
            metrics.ended(record)

    def __call__(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)


def ended(**fields: Any) -> Record:
    return Record(**{"id": "r", "endpoint": CHAT, "path": "E-P-D", "outcome": "200", "status": 200, **fields})


IMAGE = {"path": "E-P-D", "modality": "image"}


def test_each_phase_has_a_histogram_by_path_and_modality() -> None:
    events = [(0.1, "media", {"s": 0.03}), (0.2, "queued", {"s": 0.02}), (0.3, "queued", {"s": 0.5})]
    told = Told(ended(media={"image": 2}, events=events, total_s=1.0), ended(path="PD", total_s=3.0))
    count, total = "epd_proxy_phase_seconds_count", "epd_proxy_phase_seconds_sum"
    assert told(count, phase="media", **IMAGE) == told(count, phase="queue", **IMAGE) == 1
    assert told(total, phase="queue", **IMAGE) == pytest.approx(0.52), "all of its waits together"
    assert told("epd_proxy_request_seconds_sum", **IMAGE) == 1.0
    assert told("epd_proxy_request_seconds_sum", path="PD", modality="text") == 3.0


def test_a_bucket_holds_what_is_not_longer_than_its_end() -> None:
    told = Told(*(ended(media={"image": 1}, first_byte_s=s, total_s=s) for s in (1.5, 2.0, 2.001, 1e6)))
    buckets = [told("epd_proxy_ttft_seconds_bucket", le=le, **IMAGE) for le in ("1.0", "2.0", "5.0", "300.0", "+Inf")]
    assert buckets == [0, 2, 3, 3, 4]
    assert told("epd_proxy_ttft_seconds_count", **IMAGE) == 4


def test_time_per_token_is_of_what_comes_after_the_first() -> None:
    told = Told(ended(media={"image": 1}, first_byte_s=0.5, total_s=2.5, completion_tokens=41, prompt_tokens=100))
    assert told("epd_proxy_tpot_seconds_sum", **IMAGE) == pytest.approx(0.05)
    assert told("epd_proxy_tpot_seconds_bucket", le="0.05", **IMAGE) == 1
    assert told("epd_proxy_tokens_total", kind="answer", **IMAGE) == 41
    assert told("epd_proxy_tokens_total", kind="prompt", **IMAGE) == 100
    assert told("epd_proxy_tokens_total", kind="cached", **IMAGE) is None


def test_objectives_are_counted_by_their_judge_and_by_the_mean() -> None:
    stream = {"first_byte_s": 0.5, "total_s": 2.5, "completion_tokens": 41, "gaps": 40}
    left = ended(outcome="cancelled", first_byte_s=0.5)
    told = Told(ended(**stream, gaps_within=35), ended(**stream, gaps_within=36), ended(outcome="broken"), left)
    name = "epd_proxy_slo_requests_total"
    assert [told(name, judge="p90", attained=attained) for attained in ("yes", "no")] == [1, 2]
    assert [told(name, judge="mean", attained=attained) for attained in ("yes", "no")] == [2, 1]


def test_a_refusal_has_its_code_and_no_time_of_an_answer() -> None:
    told = Told(ended(path="", outcome="429", status=429, code="overloaded", total_s=9.0))
    assert told("epd_proxy_requests_total", endpoint=CHAT, status="429") == 1
    assert told("epd_proxy_errors_total", status="429", code="overloaded") == 1
    assert told("epd_proxy_request_seconds_count", path="none", modality="text") is None


def test_codes_that_stages_think_up_do_not_grow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_metrics, "MAX_CODES", 2)
    told = Told(*(ended(outcome="400", code=f"code-{number}") for number in range(5)))
    counts = [told("epd_proxy_errors_total", status="400", code=code) for code in ("code-0", "code-1", "other")]
    assert counts == [1, 1, 3]


async def test_requests_through_three_stages_are_counted_with_all_their_phases() -> None:
    async with cluster("E0", "P0", "D0") as c:
        c["E0"].usual = encodes()
        c["D0"].usual = streams(opening(0), chunk("a"), chunk("b"), chunk("c"), DONE)
        await c.client.post(CHAT, json=image_body(stream=True))
        await c.idle()
        for phase in ("body", "media", "encode", "prefill"):
            assert c.metric("epd_proxy_phase_seconds_count", phase=phase, **IMAGE) == 1, phase
        for name in ("ttft", "tpot", "request"):
            assert c.metric(f"epd_proxy_{name}_seconds_count", **IMAGE) == 1, name
        assert c.metric("epd_proxy_tokens_total", kind="answer", **IMAGE) == 3


async def test_a_call_that_failed_is_counted_though_another_one_helped() -> None:
    async with cluster("PD0", "PD1", config=settings(retries=1)) as c:
        c["PD0"].script.append(replies(500, {}))
        c["PD1"].script.append(replies(500, {}))
        await c.client.post(CHAT, json=text_body())
        await c.idle()
        failures = [
            c.metric("epd_proxy_stage_failures_total", instance=one, code="stage_failed") for one in ("PD0", "PD1")
        ]
        assert sum(failures) == 2
