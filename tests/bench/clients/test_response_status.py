"""What is a whole answer, and what only looks like one."""

from __future__ import annotations

import pytest

from bench.clients.answers import Reading, judge
from bench.clients.http import Response
from bench.clients.records import Outcome

GOOD = Reading((1.0, 2.0), 2.0, "ab", "length", 2, 7, done=True)


def answer(status: int = 200, *, ended_s: float = 2.0, **more: object) -> Response:
    return Response(status, sent_s=0.5, first_byte_s=1.0, ended_s=ended_s, **more)  # type: ignore[arg-type]


def test_a_whole_answer_is_ok_whether_or_not_a_length_was_asked_for():
    assert judge(answer(), GOOD, expected_tokens=2).outcome is Outcome.OK
    assert judge(answer(), GOOD).outcome is Outcome.OK


@pytest.mark.parametrize(
    ("given", "reading", "outcome", "fault"),
    [
        (Response(), Reading(), Outcome.ERROR, "broken"),
        (answer(429, tail=b"slow down"), Reading(), Outcome.ERROR, "status 429"),
        (answer(), Reading(garbage="<html>"), Outcome.ERROR, "garbage"),
        (answer(garbage="not HTTP"), Reading(), Outcome.ERROR, "garbage"),
        (answer(), Reading((1.0,), 1.0, error="D0 died"), Outcome.ERROR, "error event"),
        (answer(), Reading((1.0,), 1.0), Outcome.TRUNCATED, "cut"),
        (answer(), Reading(done=True), Outcome.ERROR, "empty"),
        (answer(), Reading((1.0,), 1.0, "a", "stop", 1, done=True), Outcome.TRUNCATED, "short"),
    ],
)
def test_each_bad_end_has_a_name(given, reading, outcome, fault):
    status = judge(given, reading, expected_tokens=2)

    assert (status.outcome, status.fault) == (outcome, fault)
    assert status.error


ERROR = b'data: {"error": {"message": "D0 died"}}\n\n'


@pytest.mark.parametrize(
    ("given", "stream", "fault"),
    [
        (answer(tail=b"data: [DONE]\n\n"), True, ""),
        (answer(tail=b"{}\n"), False, ""),
        (answer(tail=ERROR, ended_s=0.0), True, "error event"),
        (answer(tail=b"data: {}\n\n", ended_s=0.0), True, "cut"),
        (answer(tail=b'{"error"', ended_s=0.0), False, "cut"),
        (answer(503, tail=b"{}"), True, "status 503"),
    ],
)
def test_a_body_that_was_not_kept_is_judged_by_its_end(given, stream, fault):
    assert judge(given, None, stream=stream).fault == fault


def test_a_whole_answer_that_broke_off_is_cut_and_no_garbage():
    assert judge(answer(ended_s=0.0, tail=b'{"cho'), Reading(garbage="truncated"), stream=False).fault == "cut"
