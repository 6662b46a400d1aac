"""What is a whole answer, and what only looks like one."""

from __future__ import annotations

import pytest

from bench.client.connection import Answer
from bench.client.row import Outcome
from bench.client.sse import Reading
from bench.client.verdict import judge

GOOD = Reading((1.0, 2.0), 2.0, "length", 2, 7, done=True)


def answer(status: int = 200, **more: object) -> Answer:
    return Answer(status, sent=0.5, first=1.0, ended=2.0, **more)  # type: ignore[arg-type]


def test_a_whole_answer_is_ok_whether_or_not_a_length_was_asked_for():
    assert judge(answer(), GOOD, 2).outcome is Outcome.OK
    assert judge(answer(), GOOD, None).outcome is Outcome.OK


@pytest.mark.parametrize(
    ("given", "reading", "outcome", "fault"),
    [
        (Answer(), Reading(), Outcome.ERROR, "broken"),
        (answer(429, tail=b"slow down"), Reading(), Outcome.ERROR, "status 429"),
        (answer(), Reading(garbage="<html>"), Outcome.ERROR, "garbage"),
        (answer(garbage="not HTTP"), Reading(), Outcome.ERROR, "garbage"),
        (answer(), Reading((1.0,), 1.0, error="D0 died"), Outcome.ERROR, "error event"),
        (answer(), Reading((1.0,), 1.0), Outcome.TRUNCATED, "cut"),
        (answer(), Reading(done=True), Outcome.ERROR, "empty"),
        (answer(), Reading((1.0,), 1.0, "stop", 1, done=True), Outcome.TRUNCATED, "short"),
    ],
)
def test_each_bad_end_has_a_name(given, reading, outcome, fault):
    verdict = judge(given, reading, 2)

    assert (verdict.outcome, verdict.fault) == (outcome, fault)
    assert verdict.error
