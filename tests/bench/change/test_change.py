"""`epd-bench change`: what is judged an error, what a kill excuses, and which figures follow from rows."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from subprocess import Popen
from typing import Any

import pytest

from bench.change.command import figures
from bench.change.kills import Kill, Victim, excused, gap_s, stage_processes
from bench.change.loads import judged
from bench.change.streams import decoding
from bench.clients.answers import CUT, ERROR_EVENT
from bench.clients.results import Outcome, RequestRecord
from tests.waiting import wait_for

FRONT = Victim("front", "front.0", 1, front=True)
STAGE = Victim("stage", "D0", 2, group=True, decodes=True)


def record(outcome: Outcome = Outcome.OK, **more: Any) -> RequestRecord:
    shared: dict[str, Any] = {"run": "", "n": 0, "id": "r", "spec": "", "due_s": 0.0, "ready_s": 0.0, "ended_s": 10.0}
    return RequestRecord(**{**shared, "outcome": outcome, **more})


def test_an_answer_that_says_something_else_is_wrong_unless_the_model_says_so_at_rest() -> None:
    rows = [
        record(spec="a red circle", text="a red circle"),
        record(spec="a red circle", text="a blue square"),
        record(text="whatever"),
    ]
    assert len(judged(rows).wrong) == 1
    assert not judged(rows, at_rest=lambda one: "a blue square").wrong


def test_a_stream_that_had_begun_is_cut_and_all_else_that_has_no_whole_answer_an_error() -> None:
    rows = [
        record(Outcome.TRUNCATED, fault=CUT, first_byte_s=1.0),
        record(Outcome.ERROR, fault=ERROR_EVENT, first_byte_s=1.0),
        record(Outcome.ERROR, fault="status 503"),
        record(Outcome.TIMEOUT, fault="timeout"),
        record(Outcome.CANCELLED, fault="run ended"),
    ]
    found = judged(rows)
    assert (found.requests, len(found.cut), len(found.errors)) == (4, 2, 2)
    assert found.rows("walk", 0.0)[0] == {"part": "walk", "requests": 4, "errors": 2, "cut": 2, "wrong": 0}


@pytest.mark.parametrize(
    ("victim", "fault", "first_byte_s", "may"),
    [
        (FRONT, "broken", None, True),
        (FRONT, "status 503", None, False),
        (STAGE, ERROR_EVENT, 1.0, False),
        (STAGE, "status 503", None, False),
    ],
)
def test_a_kill_excuses_connections_of_a_front_door_and_nothing_else(
    victim: Victim, fault: str, first_byte_s: float | None, may: bool
) -> None:
    one = record(Outcome.ERROR, fault=fault, first_byte_s=first_byte_s, sent_s=1.0)
    assert excused(one, [Kill(9.5, 9.6, victim)]) is may
    assert not excused(one, [])


@pytest.mark.parametrize(("sent_s", "may"), [(9.55, True), (9.65, False)])
def test_what_was_sent_to_a_front_door_that_had_gone_already_is_not_excused(sent_s: float, may: bool) -> None:
    one = record(Outcome.ERROR, fault="broken", sent_s=sent_s)
    assert excused(one, [Kill(9.5, 9.6, FRONT)]) is may


@pytest.mark.parametrize("listens", [False, True])
def test_a_connection_is_refused_where_the_socket_went_too_and_nowhere_else(listens: bool) -> None:
    one = record(Outcome.ERROR, fault="unreachable", sent_s=None)
    assert excused(one, [Kill(one.ended_s - 0.5, one.ended_s, replace(FRONT, listens=listens))]) is listens


def test_a_connection_that_broke_long_after_the_kill_is_not_excused() -> None:
    assert not excused(record(Outcome.ERROR, fault="broken", sent_s=1.0), [Kill(2.0, 2.1, FRONT)])


def test_figures_of_a_walk_and_of_flips() -> None:
    total = {"requests": 10, "errors": 1, "cut": 2, "wrong": 3}
    rows: list[dict[str, Any]] = [
        {"part": "walk", "state": "done", "seconds": 3.0, "paused_s": 1.5},
        {"part": "walk", "state": "failed", "seconds": 9.0, "paused_s": 0.0},
        {"part": "walk", **total},
        {"part": "flips", "flipped": True, "client_s": 0.2},
        {"part": "flips", "flipped": False, "client_s": 0.4},
        {"part": "flips", **total},
        {"part": "kills", "kill": "P0"},
        {"part": "kills", **total},
    ]
    named = figures(rows)
    assert named["walk_client_errors"] == 1 and named["walk_cut_streams"] == 2 and named["walk_wrong_answers"] == 3
    assert named["walk_longest_pause_s"] == 1.5 and named["walk_changes_failed"] == 1
    assert named["flips"] == 1 and named["flip_errors"] == 4 and named["flip_p99_s"] == 0.4
    assert named["kills_client_errors"] == 4 and named["kills_cut_streams"] == 2 and named["kills"] == 1


def stream(token_s: tuple[float, ...], decode: str) -> RequestRecord:
    return record(token_s=token_s, instances=f"prefill=P0, decode={decode}")


def test_a_gap_is_between_the_last_token_before_a_kill_and_the_first_after_it() -> None:
    kills = [Kill(2.0, 2.1, STAGE)]
    assert gap_s(stream((1.0, 2.05, 2.5, 2.6), "D0"), kills) == pytest.approx(0.45)
    assert gap_s(stream((1.0, 2.5), "D1"), kills) is None
    assert gap_s(stream((1.0, 1.5), "D0"), kills) is None
    assert gap_s(stream((2.5, 2.6), "D0"), kills) is None


def status(**pids: int) -> dict[str, Any]:
    return {"instances": [{"id": name, "pid": pid, "role": name.rstrip("01")} for name, pid in pids.items()]}


def test_each_that_decodes_is_of_a_kind_of_its_own() -> None:
    assert [one.kind for one in decoding(status(P0=1, D0=2, PD1=3))] == ["D0", "PD1"]


def test_any_process_of_a_stage_may_be_killed_alone() -> None:
    with Popen(["sh", "-c", "sleep 60 & wait"], start_new_session=True) as leader:
        try:
            found = wait_for(lambda: len(two := stage_processes(status(D0=leader.pid))) == 2 and two)
        finally:
            os.killpg(leader.pid, signal.SIGKILL)
    assert {(one.kind, one.name, one.group, one.decodes) for one in found} == {("D0", "D0", False, True)}
    assert leader.pid in {one.pid for one in found}


def test_figures_of_streams_are_of_the_real_ones() -> None:
    rows = [{"part": "streams", "gap_s": gap} for gap in (0.1, 0.2, 0.3)] + [{"part": "streams", "first_s": 0.05}]
    found = figures([*rows, {"part": "streams_simulated", "gap_s": 9.0}])
    assert (found["migrations"], found["migration_gap_p50_s"]) == (3, 0.2)
