"""Cutting a byte stream into events, however it arrives."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.errors import StageRefusal, stage_answer_error
from proxy.stages.sse import (
    WholeEvents,
    compact,
    error_payload,
    is_comment,
    is_done,
    is_last,
    is_opening,
    is_plain,
    split,
)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.binary(min_size=1).filter(lambda raw: b"\n" not in raw)), st.data())
def test_events_come_out_whole_wherever_the_stream_is_cut(events: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(b"data: " + event + b"\n\n" for event in events)
    whole, out, at = WholeEvents(), [], 0
    while at < len(stream):
        step = data.draw(st.integers(1, len(stream) - at))
        out += split(whole.feed(stream[at : at + step]))
        at += step
    assert out == [b"data: " + event + b"\n\n" for event in events]


def test_kinds_of_events() -> None:
    assert is_done(b"data: [DONE]\n\n") and not is_done(b'data: {"x": "[DONE]"}\n\n')
    assert is_done(b'event: response.completed\ndata: {"type": "response.completed"}\n\n')
    assert not is_done(b'event: response.output_text.delta\ndata: {"delta": "event: response.completed"}\n\n')
    assert is_opening(b"event: response.created\ndata: {}\n\n")
    assert error_payload(b'event: error\ndata: {"message": "m"}\n\n') == b'{"message": "m"}'
    assert is_comment(b": ping\n\n")
    assert error_payload(b'data: {"error": {"code": 500}}\n\n') == b'{"error": {"code": 500}}'
    assert error_payload(b'data: {"choices": [{"delta": {"content": "\\"error\\""}}]}\n\n') is None


@pytest.mark.parametrize("name", [b"", b"event: a.data:b\n"])
def test_what_is_spaced_otherwise_is_written_anew_whatever_its_text_says(name: bytes) -> None:
    spaced = name + b'data:{"text": "data: {}", "token_ids": [1, 2]}\n\n'
    assert compact(spaced) == name + b'data: {"text":"data: {}","token_ids":[1,2]}\n\n'
    lines = b'data:{"token_ids":\ndata: [1]}\n\n'
    assert compact(lines) == lines


def test_several_events_are_judged_without_cutting_them() -> None:
    event = b'data: {"choices": [{"delta": {"content": "data: [DONE]\\n\\n{\\"error\\""}}]}\n\n'
    done = b"data: [DONE]\n\n"
    assert is_plain(event) and not is_last(event)
    assert not is_plain(b"event: response.completed\ndata: {}\n\n")
    assert is_last(done) and is_last(event + done) and not is_last(done + event)
    assert not is_plain(event + b'data: {"error": {"code": 500}}\n\n' + done)


def test_a_stages_answer_becomes_an_error_whatever_it_looks_like() -> None:
    refusal = stage_answer_error(b'{"error": {"message": "m", "param": "p", "code": 400}}', stage="P0", status=400)
    assert isinstance(refusal, StageRefusal) and (refusal.message, refusal.param, refusal.code) == ("m", "p", None)
    assert stage_answer_error(b'{"detail": "x"}', stage="P0", status=422).status == 422
    assert "P0" in stage_answer_error(b"\xff<html>", stage="P0", status=503).message
    assert stage_answer_error(b'{"error": "text"}', stage="P0", status=500).retryable
    assert stage_answer_error(b"", stage="P0", status=500).status == 502
