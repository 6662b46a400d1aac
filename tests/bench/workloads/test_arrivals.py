"""When requests arrive."""

from __future__ import annotations

import itertools
import statistics

import pytest

from bench.workloads.requests import (
    ClosedLoop,
    Poisson,
    RequestSpec,
    Trace,
    arrival_times,
    arrivals_within,
    with_arrivals,
)
from epd_serve.errors import ConfigError


def gaps(arrivals, count=6_000, seed=0):
    return list(itertools.islice(arrivals.gaps(seed), count))


def requests(paces):
    return [RequestSpec(f"r{i}", "hi", (), 64, 1, pace=pace) for i, pace in enumerate(paces)]


def test_gaps_have_the_rate_that_was_asked_for_and_are_as_far_from_it_as_poissons():
    found = gaps(Poisson(5))

    assert statistics.fmean(found) == pytest.approx(1 / 5, rel=0.1)
    assert statistics.stdev(found) / statistics.fmean(found) == pytest.approx(1.0, rel=0.1)


def test_a_seed_fixes_the_times():
    first, again, other = (list(itertools.islice(arrival_times(Poisson(3), seed), 50)) for seed in (1, 1, 2))

    assert first == again != other
    assert first == sorted(first) and first[0] > 0


def test_a_trace_keeps_its_gaps_and_begins_again_at_its_end():
    assert list(itertools.islice(arrival_times(Trace([10.0, 11.0, 14.0]), 0), 6)) == [0.0, 1.0, 4.0, 5.0, 8.0, 9.0]


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


@pytest.mark.parametrize("rate", [0, float("nan"), float("inf")])
def test_a_rate_is_above_nothing(rate):
    with pytest.raises(ConfigError, match="rate is"):
        Poisson(rate)
