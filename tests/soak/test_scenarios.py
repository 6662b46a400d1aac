"""The soak tests' own arithmetic: who is killed when, what of it clients noticed, what the front door says."""

from __future__ import annotations

import argparse

import pytest

from bench.clients.results import Outcome, RequestRecord
from bench.micro.measurement import Goal
from epd_serve.errors import StageError
from tests.soak.front_door import held, instances, parse_metrics, until
from tests.soak.harness import Result, Soak
from tests.soak.streams import most_at_once


def record(due: float, first: float | None, ended: float, fault: str = "") -> RequestRecord:
    outcome = Outcome.ERROR if fault else Outcome.OK
    return RequestRecord("r", 0, "x", "s", due, due, ended, outcome, first_byte_s=first, fault=fault)


# --- streams


def test_streams_are_together_from_their_first_byte_to_their_end() -> None:
    records = [
        record(0.0, 1.0, 5.0),
        record(0.0, 2.0, 3.0),
        record(0.0, 3.5, 6.0),
        record(0.0, None, 9.0, "timeout"),
    ]
    assert most_at_once(records) == 2
    assert most_at_once([]) == 0


# --- the front door, and the harness


def test_series_of_a_metric_are_read_by_their_whole_name() -> None:
    text = '# HELP a_total x\na_total{s="D0"} 2.0\na_total{s="D1"} 1.0\na_total_created 7.0\nb 3\n'
    found = parse_metrics(text, "a_total")
    assert found == {'a_total{s="D0"}': 2.0, 'a_total{s="D1"}': 1.0}


def test_a_front_door_that_is_shut_is_named() -> None:
    for reads in (held, instances):
        with pytest.raises(StageError, match=r"127\.0\.0\.1:1/instances"):
            reads("http://127.0.0.1:1")


def test_waiting_ends_with_the_condition_or_its_time() -> None:
    seen = iter([False, True])
    assert until(lambda: next(seen), 5.0)
    assert not until(lambda: False, 0.0)


def soak(**figures: float) -> Soak:
    def measure(arguments: argparse.Namespace) -> Result:
        return figures, [], ""

    goals = Goal("errors", "==", 0.0), Goal("not_measured", "==", 0.0)
    return Soak("fake", "nothing", measure, goals, (Goal("p99_ms", "<=", 5.0),))


def test_a_missed_goal_is_named_and_speed_is_judged_only_where_it_is_asked_for() -> None:
    slow, wrong = soak(errors=0.0, p99_ms=9.0), soak(errors=1.0, p99_ms=1.0)
    assert slow.missed(slow.run(["--quick"]), speed=False) == []
    assert slow.missed(slow.run([]), speed=True) == ["p99_ms"]
    assert wrong.missed(wrong.run([]), speed=True) == ["errors"]
