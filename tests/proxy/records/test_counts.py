"""What is counted of requests: in the last minute, what is forgotten, how right percentiles are; and for Prometheus."""

from __future__ import annotations

import math
import random
import time
from statistics import quantiles
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from epd_serve.errors import ConfigError
from proxy.config.limits import Planned, Slo
from proxy.records import counts as subject
from proxy.records.counts import (
    BOUNDS,
    LEAST_S,
    MINUTE_S,
    Counts,
    KindCounts,
    RequestCounts,
    together,
)
from proxy.records.record import Record
from tests.proxy.fakes import DONE, chunk, cluster, encodes, image_body, opening, replies, settings, streams, text_body


def ended(
    total_s: float = 1.0,
    *,
    at_s: float = 0.0,
    first_byte_s: float | None = None,
    tokens: int | None = None,
    gaps: tuple[int, int] = (0, 0),
) -> Record:
    record = Record("r", clock=at_s - total_s, outcome="200", status=200, total_s=total_s)
    record.first_byte_s, record.completion_tokens = first_byte_s, tokens
    record.gaps, record.gaps_within = gaps
    return record


def counted(*records: Record, slo: Slo = Slo()) -> Counts:
    """What has ended, as counts of the ten seconds that it took."""
    door = RequestCounts(0.0, slo)
    for record in records:
        door.ended(record)
    return door.counts(10.0)


def test_what_is_older_than_a_minute_is_forgotten() -> None:
    minute = RequestCounts(0.0)
    for second in range(200):
        minute.ended(ended(at_s=float(second)))
    counts = minute.counts(200.0)
    assert counts.seconds == MINUTE_S and counts.outcomes["200"] == 60
    assert minute.counts(1000.0).outcomes == {}


def test_a_rate_is_per_second_of_the_time_there_was() -> None:
    minute = RequestCounts(100.0)
    for _ in range(30):
        minute.ended(ended(at_s=109.0))
    assert minute.counts(110.0).summary()["requests_per_s"] == 3.0


@given(
    times=st.lists(st.floats(1000, 1100)),
    began=st.floats(990, 1000),
    now=st.floats(1100, 1170),
    window_s=st.floats(1, 60),
)
def test_a_window_has_what_came_within_the_seconds_that_it_says(
    times: list[float], began: float, now: float, window_s: float
) -> None:
    minute = RequestCounts(began)
    for at_s in sorted(times):
        minute.asked("text", at_s, requests=1)
    counts = minute.counts(now, window_s)
    assert window_s - 1e-6 <= counts.seconds < window_s + 1.0 + 1e-6
    came = sum(at_s >= math.floor(now - window_s) for at_s in times)
    assert counts.seconds == pytest.approx(now - math.floor(now - window_s), abs=1e-6)
    assert (counts.kinds["text"].requests if came else len(counts.kinds)) == came


def test_a_window_is_no_longer_than_its_process_has_counted() -> None:
    minute = RequestCounts(103.5)
    minute.asked("media", 104.0, requests=1)
    counts = minute.counts(105.5, 10.0)
    assert (counts.seconds, counts.kinds["media"].requests) == (2.0, 1)


def test_the_kinds_of_several_processes_add_up() -> None:
    doors = [RequestCounts(0.0) for _ in range(3)]
    for number, door in enumerate(doors):
        door.asked("text", 1.0, requests=1)
        door.asked("media", 1.0, requests=1)
        door.asked("media", 1.5, known_prompts=1, items=2, item_tokens=250.4, prompt_tokens=300.0 + number)
        record = ended(at_s=2.0, tokens=7 if number else None)
        record.kind = "media"
        door.ended(record)
    told = [msgspec.msgpack.decode(msgspec.msgpack.encode(door.counts(3.0)), type=Counts) for door in doors]
    assert together(told).kinds == {
        "text": KindCounts(requests=3),
        "media": KindCounts(3, 3, 3 * 2, 3 * 250, 300 + 301 + 302, ended=3, known_outputs=2, output_tokens=14),
    }


def test_the_lines_of_several_processes_add_up() -> None:
    line = {"waiting": 2, "late": 1, "over_share": 0, "work_s": 0.5}
    several = together([Counts(lines={"encode": line, "serve": line}), Counts(lines={"serve": line}), Counts()])
    assert several.summary()["lines"] == {"encode": line, "serve": {name: 2 * count for name, count in line.items()}}


def test_who_has_not_answered_is_said_and_changes_nothing_else() -> None:
    door = RequestCounts(0.0, Slo(ttft_s=1.0))
    door.ended(ended(1.0, at_s=1.0))
    whole = door.counts(2.0)
    assert (whole.answered, whole.serving) == (1, 1) and "serving" not in whole.summary()
    told = together([Counts(serving=2), whole, Counts(serving=1)]).summary()
    assert told == {**whole.summary(), "answered": 1, "serving": 4}
    assert told["slo"]["ttft_s"] == 1.0


@pytest.mark.parametrize("median_s", [0.002, 0.03, 0.7, 40.0])
def test_a_percentile_is_right_within_a_tenth(median_s: float) -> None:
    drawn = random.Random(1)
    times = [median_s * drawn.lognormvariate(0, 0.6) for _ in range(20_000)]
    told = counted(*(ended(time_s, at_s=1.0, first_byte_s=time_s) for time_s in times)).summary()["ttft_ms"]
    cuts = quantiles(times, n=100)
    assert told["p50"] == pytest.approx(1000 * cuts[49], rel=0.1)
    assert told["p99"] == pytest.approx(1000 * cuts[98], rel=0.1)


def test_no_time_is_too_short_or_too_long() -> None:
    told = [counted(ended(first_byte_s=time_s)).summary()["ttft_ms"]["p50"] for time_s in (0.0, LEAST_S, 1e9)]
    assert told[0] == told[1] <= 1000 * LEAST_S < told[2] == pytest.approx(1000 * BOUNDS[-1])
    assert counted().summary()["ttft_ms"] == {"p50": None, "p99": None}


def test_tokens_after_the_first_share_the_time_after_the_first() -> None:
    summary = counted(ended(2.1, at_s=2.1, first_byte_s=0.1, tokens=21)).summary()
    assert summary["tpot_ms"]["p50"] == pytest.approx(100, rel=0.2)
    assert summary["ttft_ms"]["p50"] == pytest.approx(100, rel=0.2)
    assert summary["tokens_per_s"] == 2.1


def test_what_several_processes_counted_adds_up() -> None:
    refused = Record("r", clock=0.0, outcome="429", status=429, code="overloaded")
    one, other = RequestCounts(-60.0), RequestCounts(0.0)
    one.ended(ended(first_byte_s=0.5))
    other.ended(ended(first_byte_s=0.5))
    other.ended(refused)
    both = together([one.counts(10.0), other.counts(10.0)])
    assert both.seconds == 60.0 and both.outcomes == {"200": 2, "429": 1} and both.refused == {"overloaded": 1}
    assert sum(both.first_byte.values()) == 2


@pytest.mark.parametrize(
    ("record", "judged", "by_gaps", "by_mean"),
    [
        ({"first_byte_s": 2.0, "total_s": 2.0 + 10 * 0.05, "tokens": 11, "gaps": (10, 9)}, 1, 1, 1),
        ({"first_byte_s": 2.01, "total_s": 2.1, "tokens": 11, "gaps": (10, 10)}, 1, 0, 0),
        ({"first_byte_s": 0.1, "total_s": 0.1 + 10 * 0.05, "tokens": 11, "gaps": (10, 8)}, 1, 0, 1),
        ({"first_byte_s": 0.1, "total_s": 9.0, "tokens": 11, "gaps": (10, 9)}, 1, 1, 0),
        ({"first_byte_s": 0.1, "total_s": 9.0, "tokens": 1}, 1, 1, 1),
        ({"total_s": 0.1}, 0, 0, 0),
    ],
)
def test_an_answer_attains_the_objective_within_both_bounds(
    record: dict[str, Any], judged: int, by_gaps: int, by_mean: int
) -> None:
    usual, mean = counted(ended(**record)), counted(ended(**record), slo=Slo(judge="mean"))
    assert (usual.judged, usual.attained, usual.by_mean) == (judged, by_gaps, by_mean)
    assert (mean.judged, mean.attained, mean.by_mean) == (judged, by_mean, by_mean)


@pytest.mark.parametrize("judge", ["p0", "p100", "median", ""])
def test_what_is_no_judge_is_refused(judge: str) -> None:
    with pytest.raises(ConfigError, match="slo: a judge of token gaps is p1 to p99, or mean"):
        Slo(judge=judge)


def test_of_several_answers_at_once_the_gaps_are_nobodys() -> None:
    record = ended(9.0, first_byte_s=0.1, tokens=40, gaps=(39, 0))
    record.answers = 2
    counts = counted(record)
    assert (counts.judged, counts.attained, counts.by_mean) == (1, 1, 1)


@pytest.mark.parametrize(
    ("outcome", "status", "judged"),
    [("cancelled", 200, 0), ("broken", 200, 1), ("503", 503, 1), ("429", 429, 1), ("400", 400, 0), ("404", 404, 0)],
)
def test_what_failed_here_misses_the_objective_and_what_its_client_did_does_not(
    outcome: str, status: int, judged: int
) -> None:
    counts = counted(Record("r", clock=0.0, outcome=outcome, status=status, first_byte_s=0.1, total_s=0.2))
    assert (counts.judged, counts.attained) == (judged, 0)


def test_goodput_is_of_the_requests_that_attain_the_objective() -> None:
    minute = RequestCounts(0.0, Slo(ttft_s=1.0))
    minute.ended(ended(1.0, first_byte_s=0.9))
    minute.ended(ended(1.2, first_byte_s=1.1))
    minute.ended(ended(1.2, first_byte_s=0.9, tokens=7, gaps=(6, 3)))
    slo = together([minute.counts(10.0), minute.counts(10.0)]).summary()["slo"]
    assert slo == {
        "ttft_s": 1.0, "tpot_s": 0.05, "judged": 6,
        "judge": "p90", "attained": 2, "attainment": 0.3333, "goodput_per_s": 0.2,
        "mean": {"attained": 4, "attainment": 0.6667, "goodput_per_s": 0.4},
    }  # fmt: skip


PLAN = Planned(rate_rps=1.0, ttft_s=0.4, tpot_s=0.02, attainment=0.95)


def minute_of(count: int, *, ttft_s: float, tpot_s: float, within: int = 9) -> dict[str, Any]:
    """Of answers of ten tokens within ten seconds, at two front doors; `within`: of their nine gaps."""
    doors = [RequestCounts(0.0, planned=PLAN), RequestCounts(0.0, planned=PLAN)]
    for number in range(count):
        total_s = ttft_s + 9 * tpot_s
        doors[number % 2].ended(ended(total_s, at_s=5.0, first_byte_s=ttft_s, tokens=10, gaps=(9, within)))
    told: dict[str, Any] = together([door.counts(60.0) for door in doors]).summary()["planned"]
    return told


def test_a_minute_that_goes_as_planned_stands_beside_the_plan() -> None:
    assert minute_of(60, ttft_s=0.45, tpot_s=0.018) == {
        "rate_rps": 1.0, "ttft_ms": 400.0, "tpot_ms": 20.0, "attainment": 0.95, "apart": [],
    }  # fmt: skip
    assert RequestCounts(0.0).counts(60.0).summary()["planned"] is None


@pytest.mark.parametrize(
    ("count", "minute", "said"),
    [
        (60, {"ttft_s": 0.8, "tpot_s": 0.02}, "TTFT p50 is"),
        (60, {"ttft_s": 0.4, "tpot_s": 0.04}, "TPOT p50 is"),
        (60, {"ttft_s": 0.4, "tpot_s": 0.02, "within": 0}, "0% are within the SLO, 95% were planned"),
        (90, {"ttft_s": 0.4, "tpot_s": 0.02}, "1.5 requests/s come, 1 were planned for"),
    ],
)
def test_what_parts_from_the_plan_is_said(count: int, minute: dict[str, Any], said: str) -> None:
    (told,) = minute_of(count, **minute)["apart"]
    assert told.startswith(said)


def test_a_few_requests_say_nothing_of_a_plan() -> None:
    assert minute_of(19, ttft_s=4.0, tpot_s=0.4)["apart"] == []


@pytest.mark.parametrize("wrong", [{"rate_rps": -1.0}, {"attainment": 1.5}, {"ttft_s": -0.1}])
def test_a_plan_that_is_none_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Planned(**wrong)


CHAT = "/v1/chat/completions"


class Told:
    """What a scrape says after these records have ended."""

    def __init__(self, *records: Record) -> None:
        self.registry, metrics = CollectorRegistry(), RequestCounts(0.0)
        self.registry.register(metrics)
        for record in records:
            metrics.ended(record)

    def __call__(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)


def noted(**fields: Any) -> Record:
    return Record(**{"id": "r", "endpoint": CHAT, "path": "E-P-D", "outcome": "200", "status": 200, **fields})


IMAGE = {"path": "E-P-D", "modality": "image"}


def test_each_phase_has_a_histogram_by_path_and_modality() -> None:
    image, now = noted(media={"image": 2}, total_s=1.0), time.monotonic()
    for event, took_s in (("media", 0.03), ("queued", 0.02), ("queued", 0.5)):
        image.took(event, now - took_s)
    told = Told(image, noted(path="PD", total_s=3.0))
    count, total = "epd_proxy_phase_seconds_count", "epd_proxy_phase_seconds_sum"
    assert told(count, phase="media", **IMAGE) == told(count, phase="queue", **IMAGE) == 1
    assert told(total, phase="queue", **IMAGE) == pytest.approx(0.52, abs=0.01), "all of its waits together"
    assert told("epd_proxy_request_seconds_sum", **IMAGE) == 1.0
    assert told("epd_proxy_request_seconds_sum", path="PD", modality="text") == 3.0


def test_a_bucket_holds_what_is_not_longer_than_its_end() -> None:
    told = Told(*(noted(media={"image": 1}, first_byte_s=s, total_s=s) for s in (1.5, 2.0, 2.001, 1e6)))
    buckets = [told("epd_proxy_ttft_seconds_bucket", le=le, **IMAGE) for le in ("1.0", "2.0", "5.0", "300.0", "+Inf")]
    assert buckets == [0, 2, 3, 3, 4]
    assert told("epd_proxy_ttft_seconds_count", **IMAGE) == 4


def test_time_per_token_is_of_what_comes_after_the_first() -> None:
    told = Told(noted(media={"image": 1}, first_byte_s=0.5, total_s=2.5, completion_tokens=41, prompt_tokens=100))
    assert told("epd_proxy_tpot_seconds_sum", **IMAGE) == pytest.approx(0.05)
    assert told("epd_proxy_tpot_seconds_bucket", le="0.05", **IMAGE) == 1
    assert told("epd_proxy_tokens_total", kind="answer", **IMAGE) == 41
    assert told("epd_proxy_tokens_total", kind="prompt", **IMAGE) == 100
    assert told("epd_proxy_tokens_total", kind="cached", **IMAGE) is None


def test_objectives_are_counted_by_their_judge_and_by_the_mean() -> None:
    stream = {"first_byte_s": 0.5, "total_s": 2.5, "completion_tokens": 41, "gaps": 40}
    left = noted(outcome="cancelled", first_byte_s=0.5)
    told = Told(noted(**stream, gaps_within=35), noted(**stream, gaps_within=36), noted(outcome="broken"), left)
    name = "epd_proxy_slo_requests_total"
    assert [told(name, judge="p90", attained=attained) for attained in ("yes", "no")] == [1, 2]
    assert [told(name, judge="mean", attained=attained) for attained in ("yes", "no")] == [2, 1]


def test_a_refusal_has_its_code_and_no_time_of_an_answer() -> None:
    told = Told(noted(path="", outcome="429", status=429, code="overloaded", total_s=9.0))
    assert told("epd_proxy_requests_total", endpoint=CHAT, status="429") == 1
    assert told("epd_proxy_errors_total", status="429", code="overloaded") == 1
    assert told("epd_proxy_request_seconds_count", path="none", modality="text") is None


def test_codes_that_stages_think_up_do_not_grow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "MAX_CODES", 2)
    told = Told(*(noted(outcome="400", code=f"code-{number}") for number in range(5)))
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
