"""Streams are read for what is measured: when content came, how it ended, what it counted."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.clients.answers import Reading, read_answer


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
