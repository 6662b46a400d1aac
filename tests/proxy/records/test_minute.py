"""The last minute: what is counted in it, what is forgotten, and how right its percentiles are."""

from __future__ import annotations

import math
import random
from statistics import quantiles
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_serve.errors import ConfigError
from proxy.config.limits import Planned, Slo
from proxy.records.minute import (
    LEAST_S,
    MINUTE_S,
    PART_S,
    Counts,
    KindCounts,
    LastMinute,
    bucket,
    percentile_s,
    together,
)
from proxy.records.record import Record


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


def test_what_is_older_than_a_minute_is_forgotten() -> None:
    minute = LastMinute(0.0)
    for second in range(200):
        minute.add(ended(at_s=float(second)))
    counts = minute.counts(200.0)
    assert counts.seconds == MINUTE_S and counts.outcomes["200"] == 60
    assert minute.counts(1000.0).outcomes == {}


def test_a_rate_is_per_second_of_the_time_there_was() -> None:
    minute = LastMinute(100.0)
    for _ in range(30):
        minute.add(ended(at_s=109.0))
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
    minute = LastMinute(began)
    for at_s in sorted(times):
        minute.arrived("text", at_s)
    counts = minute.counts(now, window_s)
    assert window_s <= counts.seconds < window_s + PART_S + 1e-6
    came = sum(at_s >= math.floor(now - window_s) for at_s in times)
    assert counts.seconds == pytest.approx(now - math.floor(now - window_s), abs=1e-6)
    assert (counts.kinds["text"].requests if came else len(counts.kinds)) == came


def test_a_window_is_no_longer_than_its_process_has_counted() -> None:
    minute = LastMinute(103.5)
    minute.arrived("media", 104.0)
    counts = minute.counts(105.5, 10.0)
    assert (counts.seconds, counts.kinds["media"].requests) == (2.0, 1)


def test_the_kinds_of_several_processes_add_up() -> None:
    doors = [LastMinute(0.0) for _ in range(3)]
    for number, door in enumerate(doors):
        door.arrived("text", 1.0)
        door.arrived("media", 1.0)
        door.prompt_known("media", 2, 250.4, 300.0 + number, 1.5)
        record = ended(at_s=2.0, tokens=7 if number else None)
        record.kind = "media"
        door.add(record)
    told = [msgspec.msgpack.decode(msgspec.msgpack.encode(door.counts(3.0)), type=Counts) for door in doors]
    assert together(told).kinds == {
        "text": KindCounts(requests=3),
        "media": KindCounts(3, 3, 3 * 2, 3 * 250, 300 + 301 + 302, ended=3, known_outputs=2, output_tokens=14),
    }


def test_who_has_not_answered_is_said_and_changes_nothing_else() -> None:
    door = LastMinute(0.0, Slo(ttft_s=1.0))
    door.add(ended(1.0, at_s=1.0))
    whole = door.counts(2.0)
    assert (whole.answered, whole.serving) == (1, 1) and "serving" not in whole.summary()
    told = together([Counts(serving=2), whole, Counts(serving=1)]).summary()
    assert told == {**whole.summary(), "answered": 1, "serving": 4}
    assert told["slo"]["ttft_s"] == 1.0


@pytest.mark.parametrize("median_s", [0.002, 0.03, 0.7, 40.0])
def test_a_percentile_is_right_within_a_tenth(median_s: float) -> None:
    drawn = random.Random(1)
    times = [median_s * drawn.lognormvariate(0, 0.6) for _ in range(20_000)]
    buckets: dict[int, int] = {}
    for time_s in times:
        buckets[bucket(time_s)] = buckets.get(bucket(time_s), 0) + 1
    cuts = quantiles(times, n=100)
    assert percentile_s(buckets, 0.5) == pytest.approx(cuts[49], rel=0.1)
    assert percentile_s(buckets, 0.99) == pytest.approx(cuts[98], rel=0.1)


def test_no_time_is_too_short_or_too_long() -> None:
    assert bucket(0.0) == bucket(LEAST_S) == 0 < bucket(1e9)
    assert percentile_s({}, 0.5) is None


def test_tokens_after_the_first_share_the_time_after_the_first() -> None:
    counts = Counts(seconds=10.0)
    counts.add(ended(2.1, first_byte_s=0.1, tokens=21))
    summary = counts.summary()
    assert summary["tpot_ms"]["p50"] == pytest.approx(100, rel=0.2)
    assert summary["ttft_ms"]["p50"] == pytest.approx(100, rel=0.2)
    assert summary["tokens_per_s"] == 2.1


def test_what_several_processes_counted_adds_up() -> None:
    refused = Record("r", outcome="429", status=429, code="overloaded")
    one, other = Counts(seconds=60.0), Counts(seconds=10.0)
    one.add(ended(first_byte_s=0.5))
    other.add(ended(first_byte_s=0.5))
    other.add(refused)
    both = together([one, other])
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
    usual, mean = Counts(seconds=10.0), Counts(seconds=10.0, slo=Slo(judge="mean"))
    usual.add(ended(**record))
    mean.add(ended(**record))
    assert (usual.judged, usual.attained, usual.by_mean) == (judged, by_gaps, by_mean)
    assert (mean.judged, mean.attained, mean.by_mean) == (judged, by_mean, by_mean)


@pytest.mark.parametrize("judge", ["p0", "p100", "median", ""])
def test_what_is_no_judge_is_refused(judge: str) -> None:
    with pytest.raises(ConfigError, match="slo: a judge of token gaps is p1 to p99, or mean"):
        Slo(judge=judge)


def test_of_several_answers_at_once_the_gaps_are_nobodys() -> None:
    counts, record = Counts(seconds=10.0), ended(9.0, first_byte_s=0.1, tokens=40, gaps=(39, 0))
    record.answers = 2
    counts.add(record)
    assert (counts.judged, counts.attained, counts.by_mean) == (1, 1, 1)


@pytest.mark.parametrize(
    ("outcome", "status", "judged"),
    [("cancelled", 200, 0), ("broken", 200, 1), ("503", 503, 1), ("429", 429, 1), ("400", 400, 0), ("404", 404, 0)],
)
def test_what_failed_here_misses_the_objective_and_what_its_client_did_does_not(
    outcome: str, status: int, judged: int
) -> None:
    counts = Counts(seconds=10.0)
    counts.add(Record("r", outcome=outcome, status=status, first_byte_s=0.1, total_s=0.2))
    assert (counts.judged, counts.attained) == (judged, 0)


def test_goodput_is_of_the_requests_that_attain_the_objective() -> None:
    minute = LastMinute(0.0, Slo(ttft_s=1.0))
    minute.add(ended(1.0, first_byte_s=0.9))
    minute.add(ended(1.2, first_byte_s=1.1))
    minute.add(ended(1.2, first_byte_s=0.9, tokens=7, gaps=(6, 3)))
    slo = together([minute.counts(10.0), minute.counts(10.0)]).summary()["slo"]
    assert slo == {
        "ttft_s": 1.0, "tpot_s": 0.05, "judged": 6,
        "judge": "p90", "attained": 2, "attainment": 0.3333, "goodput_per_s": 0.2,
        "mean": {"attained": 4, "attainment": 0.6667, "goodput_per_s": 0.4},
    }  # fmt: skip


PLAN = Planned(rate_rps=1.0, ttft_s=0.4, tpot_s=0.02, attainment=0.95)


def minute_of(count: int, *, ttft_s: float, tpot_s: float, within: int = 9) -> dict[str, Any]:
    """Of answers of ten tokens within ten seconds, at two front doors; `within`: of their nine gaps."""
    doors = [LastMinute(0.0, planned=PLAN), LastMinute(0.0, planned=PLAN)]
    for number in range(count):
        total_s = ttft_s + 9 * tpot_s
        doors[number % 2].add(ended(total_s, at_s=5.0, first_byte_s=ttft_s, tokens=10, gaps=(9, within)))
    told: dict[str, Any] = together([door.counts(60.0) for door in doors]).summary()["planned"]
    return told


def test_a_minute_that_goes_as_planned_stands_beside_the_plan() -> None:
    assert minute_of(60, ttft_s=0.45, tpot_s=0.018) == {
        "rate_rps": 1.0, "ttft_ms": 400.0, "tpot_ms": 20.0, "attainment": 0.95, "apart": [],
    }  # fmt: skip
    assert LastMinute(0.0).counts(60.0).summary()["planned"] is None


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
