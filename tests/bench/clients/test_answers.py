"""What an answer was: when its content came, what is whole, and what only looks like it."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.clients.answers import Reading, judge, read_answer
from bench.clients.http import Response
from bench.clients.results import Outcome


def event(**body: Any) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def delta(finish: str | None = None, **delta: Any) -> bytes:
    return event(choices=[{"index": 0, "delta": delta, "finish_reason": finish}])


DONE = b"data: [DONE]\n\n"
ROLE = delta(role="assistant", content="")
WHOLE = (
    ROLE + delta(content="a") + delta(content="b", finish="length") + event(choices=[], usage={"completion_tokens": 2})
)


def test_a_role_alone_is_no_token_and_the_usage_is_not_the_end():
    pieces = [(1.0, ROLE), (2.0, delta(content="a")), (3.0, delta(content="b", finish="stop"))]
    pieces += [(4.0, event(choices=[], usage={"prompt_tokens": 5, "completion_tokens": 2})), (5.0, DONE)]

    assert read_answer(pieces) == Reading((2.0, 3.0), 3.0, "ab", "stop", 2, 5, done=True)


@pytest.mark.parametrize(
    "content",
    [
        {"reasoning_content": "x"},
        {"reasoning": "x"},
        {"refusal": "x"},
        {"tool_calls": [{"index": 0}]},
        {"content": " "},
    ],
)
def test_whatever_a_client_is_shown_is_content(content):
    assert read_answer([(1.0, delta(**content))]).content_s == (1.0,)


@pytest.mark.parametrize("content", [{}, {"content": ""}, {"content": None}, {"tool_calls": []}])
def test_what_is_empty_is_none(content):
    assert read_answer([(1.0, delta(**content))]).content_s == ()


def test_a_token_that_is_no_text_is_content_where_its_id_is_told():
    silent = {"index": 0, "delta": {"content": ""}, "token_ids": [7]}
    pieces = [(1.0, event(choices=[silent])), (2.0, event(choices=[silent | {"token_ids": None}]))]
    pieces += [(3.0, event(choices=[{"index": 0, "text": "", "token_ids": [8]}]))]

    assert read_answer(pieces).content_s == (1.0, 3.0)


def test_the_older_completions_have_text():
    assert read_answer([(1.0, event(choices=[{"text": "hi"}]))]).content_s == (1.0,)


def test_a_last_event_without_text_is_where_the_content_ends():
    assert read_answer([(1.0, delta(content="a")), (2.0, delta(finish="stop"))]).last_s == 2.0


def test_an_event_has_the_time_of_the_read_that_completed_it():
    first, rest = delta(content="a")[:9], delta(content="a")[9:]

    assert read_answer([(1.0, first), (2.0, rest)]).content_s == (2.0,)


@given(st.lists(st.integers(1, len(WHOLE + DONE) - 1), max_size=12))
def test_wherever_reads_are_cut_the_events_are_the_same(cuts):
    whole, ends = WHOLE + DONE, [0, *sorted(cuts), len(WHOLE + DONE)]
    pieces = [(0.0, whole[begin:end]) for begin, end in pairwise(ends)]

    assert read_answer(pieces) == read_answer([(0.0, whole)])
    with_returns = [(at, piece.replace(b"\n", b"\r\n")) for at, piece in pieces]
    assert read_answer(with_returns) == read_answer([(0.0, whole)])


def test_comments_event_names_and_several_data_lines_are_read():
    stream = b': ping\n\nevent: x\ndata: {"choices":\ndata: [{"text":"a"}]}\n\ndata:{"choices":[{"text":"b"}]}\n\n'

    assert len(read_answer([(0.0, stream)]).content_s) == 2


def test_an_error_event_is_an_error_even_before_a_done():
    read = read_answer([(1.0, delta(content="a") + event(error={"message": "D0 died"}) + DONE)])

    assert "D0 died" in read.error
    assert not read.done


@pytest.mark.parametrize("garbage", [b"<html>It works!</html>", b"data: {no json}\n\n", b'data: {"choices": 3}\n\n'])
def test_what_is_no_stream_is_garbage_and_says_how_it_begins(garbage):
    read = read_answer([(1.0, garbage)])

    assert read.garbage
    assert garbage.decode().strip().removeprefix("data: ")[:8] in read.garbage


def test_a_stream_that_breaks_off_is_not_done():
    assert not read_answer([(1.0, WHOLE), (2.0, b'data: {"cho')]).done
    assert not read_answer([(1.0, WHOLE), (2.0, b'data: {"cho')]).garbage


def test_an_answer_in_one_piece_is_read_as_a_stream_of_one_event():
    body = json.dumps({"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}], "usage": {}}).encode()

    read = read_answer([(1.0, body[:9]), (2.0, body[9:])], stream=False)
    assert (read.content_s, read.text, read.finish_reason, read.done) == ((2.0,), "hi", "stop", True)


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
