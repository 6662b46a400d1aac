"""One circuit: when it opens, when it lets a probe through, and what closes it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from proxy.stages.circuit import Circuit, CircuitLimits, State

LIMITS = CircuitLimits(failures=3, open_s=2.0, open_max_s=5.0)


def circuit() -> Circuit:
    return Circuit(LIMITS, random=lambda: 0.5)


def opened(at: float = 0.0) -> Circuit:
    one = circuit()
    assert [one.failed(at) for _ in range(3)] == [False, False, True]
    return one


def test_failures_in_a_row_open_it_and_a_success_between_them_does_not() -> None:
    one = circuit()
    one.failed(0.0)
    one.failed(0.0)
    one.succeeded()
    one.failed(0.0)
    one.failed(0.0)
    assert one.state(0.0) is State.CLOSED
    assert one.failed(0.0)
    assert one.state(0.0) is State.OPEN and one.suspended(1.9)


def test_after_its_time_one_call_probes_and_others_stay_away() -> None:
    one = opened()
    assert one.state(2.0) is State.HALF_OPEN and not one.suspended(2.0)
    probe, other = object(), object()
    one.began(probe, 2.0)
    one.began(other, 2.0)
    assert one.suspended(2.0)
    one.ended(other)
    assert one.suspended(2.0), "the probe is under way"
    one.ended(probe)
    assert not one.suspended(2.0), "no verdict: the next one probes"


def test_a_probe_that_succeeds_closes_it() -> None:
    one = opened()
    one.began("probe", 2.0)
    one.succeeded()
    assert one.state(2.0) is State.CLOSED and not one.suspended(2.0)


def test_a_probe_that_fails_doubles_the_time_up_to_a_bound() -> None:
    one = opened()
    now, opened_for = 0.0, []
    for _ in range(4):
        now += one.open_for_s(now)
        assert one.state(now) is State.HALF_OPEN
        one.began("probe", now)
        assert one.failed(now)
        one.ended("probe")
        opened_for.append(one.open_for_s(now))
    assert opened_for == [4.0, 5.0, 5.0, 5.0]


def test_instances_that_failed_together_are_not_probed_together() -> None:
    soon, late = (Circuit(LIMITS, random=lambda value=value: value) for value in (0.0, 1.0))
    for one in (soon, late):
        for _ in range(3):
            one.failed(0.0)
    assert (soon.open_for_s(0.0), late.open_for_s(0.0)) == (1.5, 2.5)


@examples(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["begin", "end", "good", "bad"]), st.sampled_from([0.0, 0.5, 3.0]))))
def test_whatever_happened_it_is_tried_again_once_all_calls_are_over(moves: list[tuple[str, float]]) -> None:
    one, now, calls = circuit(), 0.0, []
    for move, passed in moves:
        now += passed
        if move == "begin":
            calls.append(object())
            one.began(calls[-1], now)
        elif move == "end" and calls:
            one.ended(calls.pop(0))
        elif move == "good":
            one.succeeded()
        elif move == "bad":
            one.failed(now)
    for call in calls:
        one.ended(call)
    assert not one.suspended(now + LIMITS.open_max_s * 1.25)
