"""Cutting a byte stream into events, however it arrives."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.errors import StageRefusal, stage_answer_error
from proxy.stages.sse import DONE, Event, WholeEvents, is_plain, split


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
    assert Event(b"data: [DONE]\n\n").done and not Event(b'data: {"x": "[DONE]"}\n\n').done
    assert Event(b'event: response.completed\ndata: {"type": "response.completed"}\n\n').done
    assert not Event(b'event: response.output_text.delta\ndata: {"delta": "event: response.completed"}\n\n').done
    assert Event(b"event: response.created\ndata: {}\n\n").opening
    assert Event(b'event: error\ndata: {"message": "m"}\n\n').failure == b'{"message": "m"}'
    assert Event(b": ping\n\n").comment
    assert Event(b'data: {"error": {"code": 500}}\n\n').failure == b'{"error": {"code": 500}}'
    assert Event(b'data: {"choices": [{"delta": {"content": "\\"error\\""}}]}\n\n').failure is None


SPACINGS = [(",", ":"), (", ", ": "), (" ,", "\t:  ")]


@pytest.mark.parametrize("field", [b"data: ", b"data:", b"data:  "])
@pytest.mark.parametrize("separators", SPACINGS)
def test_errors_aborts_and_ends_are_told_however_they_are_spaced(field: bytes, separators: tuple[str, str]) -> None:
    def event(**fields: object) -> bytes:
        return field + json.dumps(fields, separators=separators).encode() + b"\n\n"

    failed = event(error={"message": "m", "code": 500})
    payload = Event(failed).failure
    assert payload is not None and json.loads(payload)["error"]["code"] == 500 and not is_plain(failed)
    aborted = event(choices=[{"index": 0, "delta": {}, "finish_reason": "abort"}])
    assert b"aborted" in (Event(aborted).failure or b"") and not is_plain(aborted)
    fine = event(choices=[{"delta": {"content": '"error" "abort"'}, "finish_reason": None}], error=None)
    assert Event(fine).failure is None
    end = field + b"[DONE]\n\n"
    assert Event(end).done and DONE in end and not Event(fine).done
    whole = WholeEvents()
    assert whole.feed(fine + end) == fine + end and whole.done


def test_lines_of_one_event_are_its_data() -> None:
    event = Event(b"event: a.data:b\ndata: {\ndata: }\n\n")
    assert (event.name, event.data) == (b"a.data:b", b"{\n}")
    assert (Event(b": ping\n\n").name, Event(b": ping\n\n").data) == (b"", b"")


def test_what_is_no_json_but_speaks_of_an_error_is_one() -> None:
    assert Event(b'data: {"error": {"mess\n\n').failure == b'{"error": {"mess'


def test_several_events_are_judged_without_cutting_them() -> None:
    event = b'data: {"choices": [{"delta": {"content": "a {\\"error\\"}"}}]}\n\n'
    done = b"data: [DONE]\n\n"
    assert is_plain(event + event) and not is_plain(event + done)
    assert not is_plain(b"event: response.completed\ndata: {}\n\n")
    assert not is_plain(event + b'data: {"error": {"code": 500}}\n\n' + done)


def test_a_stages_answer_becomes_an_error_whatever_it_looks_like() -> None:
    refusal = stage_answer_error(b'{"error": {"message": "m", "param": "p", "code": 400}}', stage="P0", status=400)
    assert isinstance(refusal, StageRefusal) and (refusal.message, refusal.param, refusal.code) == ("m", "p", None)
    assert stage_answer_error(b'{"detail": "x"}', stage="P0", status=422).status == 422
    assert "P0" in stage_answer_error(b"\xff<html>", stage="P0", status=503).message
    assert stage_answer_error(b'{"error": "text"}', stage="P0", status=500).retryable
    assert stage_answer_error(b"", stage="P0", status=500).status == 502
