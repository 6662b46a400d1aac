"""The soak tests' own arithmetic: who is killed when, what of it clients noticed, what the front door says."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from bench.clients.answers import CUT, ERROR_EVENT
from bench.clients.results import Outcome, RequestRecord
from bench.micro.measurement import Goal
from epd_serve.errors import StageError
from tests.soak.front_door import held, instances, parse_metrics, until
from tests.soak.harness import Result, Soak
from tests.soak.kills import Kill, judged, plan, victim
from tests.soak.streams import most_at_once


def record(due: float, first: float | None, ended: float, fault: str = "") -> RequestRecord:
    outcome = Outcome.ERROR if fault else Outcome.OK
    return RequestRecord("r", 0, "x", "s", due, due, ended, outcome, first_byte_s=first, fault=fault)


# --- kills


def test_an_answer_of_which_nothing_came_is_an_error_and_a_stream_cut_by_a_death_is_counted_apart() -> None:
    records = [
        record(0.0, 0.5, 1.0),
        record(4.0, 5.5, 6.0),
        record(4.5, 4.8, 5.1, ERROR_EVENT),
        record(4.6, None, 5.1, "status 502"),
        record(4.7, 4.9, 5.1, CUT),
    ]
    figures, bad = judged(records, [Kill(5.0, "D0")])
    assert figures["client_errors_under_kills"] == 2 and figures["streams_cut_by_kills"] == 1
    assert [one.fault for one in bad] == [ERROR_EVENT, "status 502", CUT]
    assert figures["requests_hit"] == 4 and figures["hit_whole_p50_ms"] == 2000.0
    assert figures["other_whole_p99_ms"] == 1000.0


def test_a_run_without_kills_hits_nobody() -> None:
    figures, _ = judged([record(0.0, 0.5, 1.0)], [])
    assert figures["requests_hit"] == 0 and "hit_whole_p50_ms" not in figures


def views(down: str = "", names: str = "E0 E1 P0 P1 D0 D1") -> list[dict[str, Any]]:
    return [{"id": name, "role": name[0], "up": name not in down.split()} for name in names.split()]


def test_instances_are_killed_in_turn() -> None:
    killed, order = "", []
    for _ in range(7):
        found = victim(views(), killed)
        assert found is not None
        order.append(killed := found)
    assert order == ["D0", "E0", "P0", "D1", "E1", "P1", "D0"]


def test_nobody_is_killed_whose_role_would_be_left_without_an_instance() -> None:
    assert victim(views(down="D1"), "") == "E0"
    assert victim(views(down="D1 E1 P1"), "") is None
    assert victim(views(names="E0 P0 P1 D0 D1"), "D0") == "E0", "prefill encodes where no encoder is left"
    assert victim(views(names="E0 P0 D0"), "E0") == "E0"


def test_the_real_stages_are_fewer_and_have_more_time() -> None:
    simulated, real = plan(True, real=False), plan(True, real=True)
    assert simulated.seconds == 60.0 and simulated.every_s == 10.0
    assert real.up_within_s > simulated.up_within_s and real.text_per_s < simulated.text_per_s
    assert plan(False, real=False).seconds == 300.0


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
