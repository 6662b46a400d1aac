"""When requests arrive."""

from __future__ import annotations

import itertools
import statistics

import pytest

from bench.workloads.requests import (
    ClosedLoop,
    Gamma,
    Poisson,
    RequestSpec,
    Trace,
    arrival_times,
    arrivals_at,
    arrivals_within,
    with_arrivals,
)
from epd_serve.errors import ConfigError


def gaps(arrivals, count=6_000, seed=0):
    return list(itertools.islice(arrivals.gaps(seed), count))


def requests(paces):
    return [RequestSpec(f"r{i}", "hi", (), 64, 1, pace=pace) for i, pace in enumerate(paces)]


@pytest.mark.parametrize(("arrivals", "cv"), [(Poisson(5), 1.0), (Gamma(5, 2.5), 2.5), (Gamma(5, 0.4), 0.4)], ids=str)
def test_gaps_have_the_rate_and_the_burstiness_that_were_asked_for(arrivals, cv):
    found = gaps(arrivals)

    assert statistics.fmean(found) == pytest.approx(1 / 5, rel=0.1)
    assert statistics.stdev(found) / statistics.fmean(found) == pytest.approx(cv, rel=0.1)


def test_a_seed_fixes_the_times():
    first, again, other = (list(itertools.islice(arrival_times(Poisson(3), seed), 50)) for seed in (1, 1, 2))

    assert first == again != other
    assert first == sorted(first) and first[0] > 0


def test_a_trace_keeps_its_gaps_and_begins_again_at_its_end():
    assert list(itertools.islice(arrival_times(Trace([10.0, 11.0, 14.0]), 0), 6)) == [0.0, 1.0, 4.0, 5.0, 8.0, 9.0]


def test_a_trace_is_scaled_to_a_rate():
    times = list(itertools.islice(arrival_times(Trace([0.0, 1.0, 4.0], rate_rps=10), 0), 5))

    assert times == pytest.approx([0.0, 0.05, 0.2, 0.25, 0.4])


def test_requests_of_a_burst_come_closer_together_and_the_mean_rate_stays():
    paces = [0.5] * 25 + [2.0] * 100 + [0.5] * 25  # mean of 1 / pace: 1
    paced = [request.arrival_s for request in with_arrivals(requests(paces), Poisson(10), 3)]
    plain = [request.arrival_s for request in with_arrivals(requests([1.0] * 150), Poisson(10), 3)]

    assert paced[100] - paced[30] == pytest.approx((plain[100] - plain[30]) / 2, abs=1e-5)
    assert paced[10] == pytest.approx(plain[10] * 2, abs=1e-5)


def test_a_trace_keeps_its_times_whatever_the_bursts_of_a_workload():
    dated = with_arrivals(requests([0.5, 4.0, 1.0]), Trace([0.0, 1.0, 4.0]), 0)

    assert [request.arrival_s for request in dated] == [0.0, 1.0, 4.0]


def test_a_closed_loop_has_no_times():
    assert [request.arrival_s for request in with_arrivals(requests([1.0] * 3), ClosedLoop(2), 0)] == [None] * 3


def test_times_within_a_span_are_all_of_it():
    found = arrivals_within(Poisson(20), 10.0, 4)

    assert 150 < len(found) < 250
    assert found == sorted(found) and found[-1] < 10.0


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("poisson", Poisson(4)),
        ("gamma:2", Gamma(4, 2)),
    ],
)
def test_arrivals_are_written_in_a_word(text, meant):
    assert arrivals_at(text, 4) == meant


def test_a_trace_file_is_read(tmp_path):
    file = tmp_path / "trace.txt"
    file.write_text("# seconds\n0\n\n0.5\n2\n")

    assert arrivals_at(f"trace:{file}") == Trace((0.0, 0.5, 2.0))
    assert arrivals_at(f"trace:{file}", 3) == Trace((0.0, 0.5, 2.0), 3)


def test_a_trace_of_mooncake_s_is_read(tmp_path):
    file = tmp_path / "trace.jsonl"
    file.write_text('{"timestamp": 0, "input_length": 6955, "hash_ids": [1]}\n{"timestamp": 3052}\n')

    assert arrivals_at(f"trace:{file}") == Trace((0.0, 3.052))


@pytest.mark.parametrize(
    ("text", "rate", "says"),
    [
        ("poison", 4, "gamma:CV or trace:FILE"),
        ("poisson:4", 4, "gamma:CV or trace:FILE"),
        ("poisson", None, "--rate R"),
        ("poisson", 0, "rate is 0"),
        ("poisson", float("nan"), "rate is nan"),
        ("gamma:-1", 4, "cv is -1"),
        ("gamma:x", 4, "gamma:CV"),
        ("trace:/nowhere/t.txt", None, "/nowhere/t.txt cannot be read"),
    ],
)
def test_a_wrong_word_is_told_what_is_right(text, rate, says):
    with pytest.raises(ConfigError, match=says):
        arrivals_at(text, rate)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("0\nsoon\n", r":2: 'soon'"),
        ('{"timestamp": 0}\n{"time": 1}\n', ":2: .*neither seconds"),
        ('{"timestamp": "1"}\n', ":1: "),
        ("0\n-1\n", ":2: '-1'"),
        ("3\n1\n", ":2: 1 s is before"),
        ("1\n", "two arrivals"),
    ],
)
def test_a_bad_line_of_a_trace_is_named(tmp_path, lines, says):
    file = tmp_path / "trace.txt"
    file.write_text(lines)

    with pytest.raises(ConfigError, match=says):
        arrivals_at(f"trace:{file}")
