"""Speeds learnt from calls: work per busy second, whatever the calls' own durations."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.encode.learnt_speeds import HORIZON_S, MAX_INCARNATIONS, LearntSpeeds

E0, E1 = ("E0", "1"), ("E1", "1")


def test_calls_that_wait_for_each_other_count_their_time_once() -> None:
    speeds = LearntSpeeds()
    speeds.begin(E0, 0.0)
    speeds.begin(E0, 0.0)
    speeds.end(E0, 1.0, done=100)
    speeds.end(E0, 2.0, done=100)
    assert speeds.rate(E0) == pytest.approx(100)


def test_idle_time_is_no_time_and_another_incarnation_is_another_encoder() -> None:
    speeds = LearntSpeeds()
    for begun in (0.0, 50.0):
        speeds.begin(E0, begun)
        speeds.end(E0, begun + 1.0, done=100)
    assert speeds.rate(E0) == pytest.approx(100)
    assert speeds.rate(("E0", "2")) == speeds.rate(E1) == 0


def test_nothing_is_believed_before_there_is_enough_of_it() -> None:
    speeds = LearntSpeeds()
    speeds.begin(E0, 0.0)
    speeds.end(E0, 0.01, done=1000)
    assert speeds.rate(E0) == 0


def test_an_encoder_that_becomes_slow_is_noticed() -> None:
    speeds = LearntSpeeds()
    for second in range(60):
        speeds.begin(E0, float(second))
        speeds.end(E0, second + 1.0, done=1000 if second < 30 else 100)
    assert speeds.rate(E0) < 250


@settings(max_examples=30)
@given(st.lists(st.tuples(st.floats(0.1, HORIZON_S), st.floats(10, 1000)), min_size=1, max_size=30))
def test_a_speed_lies_between_the_slowest_and_the_fastest_call(turns: list[tuple[float, float]]) -> None:
    speeds, now = LearntSpeeds(), 0.0
    for busy_s, rate in turns:
        speeds.begin(E0, now)
        now += busy_s
        speeds.end(E0, now, done=busy_s * rate)
    rates = [rate for _, rate in turns]
    assert min(rates) * 0.99 <= speeds.rate(E0) <= max(rates) * 1.01


def test_past_incarnations_are_forgotten() -> None:
    speeds = LearntSpeeds()
    for incarnation in range(MAX_INCARNATIONS + 10):
        speeds.begin((f"E{incarnation}", "1"), 0.0)
        speeds.end((f"E{incarnation}", "1"), 1.0, done=1)
    assert speeds.rate(E0) == 0 and speeds.rate((f"E{MAX_INCARNATIONS}", "1")) == 1
    speeds.end(("E0", "1"), 2.0, done=1)  # a late word about one of them is no harm
