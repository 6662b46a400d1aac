"""One circuit: when it opens, when it lets a probe through, and what closes it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from proxy.stages.circuits import Circuit, CircuitLimits, State

LIMITS = CircuitLimits(failures=3, open_s=2.0, open_max_s=5.0)


def circuit() -> Circuit:
    return Circuit(LIMITS, random=lambda: 0.5)


def opened(at: float = 0.0) -> Circuit:
    one = circuit()
    assert [one.failed(at) for _ in range(3)] == [0.0, 0.0, 2.0]
    return one


def test_failures_in_a_row_open_it() -> None:
    one = circuit()
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


def test_a_probe_that_fails_doubles_the_time_up_to_a_bound() -> None:
    one = opened()
    now, opened_for = 0.0, list[float]()
    for _ in range(4):
        now += opened_for[-1] if opened_for else 2.0
        assert one.state(now) is State.HALF_OPEN
        one.began("probe", now)
        opened_for.append(one.failed(now))
        one.ended("probe")
    assert opened_for == [4.0, 5.0, 5.0, 5.0]


def test_instances_that_failed_together_are_not_probed_together() -> None:
    soon, late = (Circuit(LIMITS, random=lambda value=value: value) for value in (0.0, 1.0))
    assert [[one.failed(0.0) for _ in range(3)][-1] for one in (soon, late)] == [1.5, 2.5]


@examples(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["begin", "end", "bad"]), st.sampled_from([0.0, 0.5, 3.0]))))
def test_whatever_happened_it_is_tried_again_once_all_calls_are_over(moves: list[tuple[str, float]]) -> None:
    one, now, calls = circuit(), 0.0, []
    for move, passed in moves:
        now += passed
        if move == "begin":
            calls.append(object())
            one.began(calls[-1], now)
        elif move == "end" and calls:
            one.ended(calls.pop(0))
        elif move == "bad":
            one.failed(now)
    for call in calls:
        one.ended(call)
    assert not one.suspended(now + LIMITS.open_max_s * 1.25)
