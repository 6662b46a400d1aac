"""How an answer ended, from its last bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.records.answer_end import AnswerEnd, answer_end

USAGE = {"prompt_tokens": 17, "total_tokens": 20, "completion_tokens": 3, "prompt_tokens_details": None}
RESPONSE_USAGE = {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 8}, "output_tokens": 2}


def compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


@pytest.mark.parametrize("written", [compact, lambda value: json.dumps(value).encode()])
def test_of_a_whole_answer_both_are_read(written: Any) -> None:
    answer = {
        "choices": [{"message": {"content": "x"}, "finish_reason": "length", "stop_reason": None}],
        "usage": USAGE,
    }
    assert answer_end(written(answer)) == AnswerEnd("length", 17, 3, None)


def test_of_a_stream_the_event_before_the_end_says_why() -> None:
    last = compact({"choices": [{"delta": {"content": ""}, "finish_reason": "stop"}]})
    usage = compact({"choices": [], "usage": {**USAGE, "prompt_tokens_details": {"cached_tokens": 16}}})
    assert answer_end(b"data: %b\n\ndata: [DONE]\n\n" % last) == AnswerEnd("stop", None, None, None)
    assert answer_end(b"data: %b\n\ndata: %b\n\ndata: [DONE]\n\n" % (last, usage)) == AnswerEnd("stop", 17, 3, 16)


def test_of_a_stream_that_counts_all_along_the_last_count_holds() -> None:
    first, last = ({**USAGE, "completion_tokens": count} for count in (1, 3))
    events = [
        compact({"choices": [{"delta": {"content": "a"}, "finish_reason": None}], "usage": first}),
        compact({"choices": [{"delta": {"content": ""}, "finish_reason": None}], "usage": last}),
    ]
    assert answer_end(b"data: %b\n\ndata: %b\n\ndata: [DONE]\n\n" % tuple(events)) == AnswerEnd("", 17, 3, None)


def test_a_response_says_it_in_words_of_its_own() -> None:
    event = compact({"type": "response.completed", "response": {"status": "completed", "usage": RESPONSE_USAGE}})
    assert answer_end(b"event: response.completed\ndata: %b\n\n" % event) == AnswerEnd("completed", 9, 2, 8)


@pytest.mark.parametrize("content", ['"finish_reason": "stop"', '{"usage": {"prompt_tokens": 5}}', '"usage":'])
def test_what_an_answer_says_is_not_taken_for_how_it_ended(content: str) -> None:
    assert answer_end(compact({"choices": [{"message": {"content": content}}]})) == AnswerEnd("", None, None, None)


def test_of_a_long_answer_the_usage_counts_wherever_it_stands() -> None:
    answer = {"usage": USAGE, "choices": [{"message": {"content": "data: " * 5000}, "finish_reason": "stop"}]}
    assert answer_end(compact(answer)) == AnswerEnd("stop", 17, 3, None)


def test_an_event_that_quotes_an_event_is_read_as_one() -> None:
    quoted = 'data: {"choices": [{"finish_reason": "length"}]}'
    last = compact({"choices": [{"delta": {"content": quoted}, "finish_reason": "stop"}]})
    assert answer_end(b"data: %b\n\ndata: [DONE]\n\n" % last) == AnswerEnd("stop")


def test_nothing_ends_in_nothing() -> None:
    assert answer_end(b"") == AnswerEnd("", None, None, None)
