"""What is kept of a stream, and another stage's answer without it: wherever the first one was cut, however the second
one's tokens are merged, the client gets one answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import assume
from hypothesis import given as drawn
from hypothesis import strategies as st

from epd_serve.errors import StageError
from proxy.config.limits import MigrationLimits
from proxy.stages import sse
from proxy.stages.history import STREAM_BYTES, HistoryRoom, TokenHistory
from proxy.stages.sse import Event, split
from tests.proxy.fakes import DONE, opening
from tests.proxy.generate.streams import SPACED, Form, Tokens, answers, given_of, meaning, numbers, respaced, rest_of

forms = st.builds(Form, chat=st.booleans(), logprobs=st.booleans(), ids=st.just(True), usage=st.booleans())


@drawn(forms, answers, numbers, numbers, st.integers(0, 10))
def test_the_rest_is_what_the_client_lacks(
    form: Form, tokens: Tokens, merges: list[int], others: list[int], cut: int
) -> None:
    before = split(form.stream(tokens, merges))[:-1][:cut]
    given = given_of(*before)
    assume(not (form.usage and len(before) == len(split(form.stream(tokens, merges))) - 1))  # nothing is lacking
    rest = rest_of(given, form.stream(tokens, others)) if before else form.stream(tokens, others)
    assert meaning(b"".join(before) + rest) == meaning(form.stream(tokens))


def call(index: int, name: str | None, arguments: str, made_by: str) -> dict[str, Any]:
    function = {"arguments": arguments} if name is None else {"name": name, "arguments": arguments}
    header = {} if name is None else {"id": f"{made_by}-{index}", "type": "function"}
    return {"index": index, **header, "function": function}


def spoken(deltas: Sequence[dict[str, Any]], made_by: str, created: int) -> list[bytes]:
    """A stream of these deltas, a token each, with ids of calls and a time that are `made_by`'s own."""
    events = [opening(0)]
    for token, delta in enumerate(deltas):
        shown = {**delta}
        if "tool_calls" in shown:
            shown["tool_calls"] = [call(index, name, said, made_by) for index, name, said in shown["tool_calls"]]
        last = token == len(deltas) - 1
        choice = {"index": 0, "delta": shown, "logprobs": None, "finish_reason": "tool_calls" if last else None}
        fields = {"id": "x", "created": created, "choices": [{**choice, "token_ids": [token]}]}
        events.append(b"data: " + json.dumps(fields, separators=(",", ":")).encode() + b"\n\n")
    return [*events, DONE]


DELTAS: Sequence[dict[str, Any]] = [
    {"reasoning": "Hm"},
    {"reasoning": ", 😀"},
    {},
    {"content": "I "},
    {"content": "call"},
    {"tool_calls": [(0, "look", "")]},
    {"tool_calls": [(0, None, '{"a"')]},
    {"tool_calls": [(0, None, ": 1}")]},
    {"tool_calls": [(1, "look", "{}"), (2, "see", "{")]},
    {"tool_calls": [(2, None, "}")]},
    {},
]


@pytest.mark.parametrize("cut", range(2, len(DELTAS) + 2))
def test_each_channel_goes_on_and_calls_keep_the_ids_that_the_client_has(cut: int) -> None:
    before = spoken(DELTAS, "first", 1)[:cut]
    rest = rest_of(given_of(*before), b"".join(spoken(DELTAS, "second", 2)))
    said: dict[Any, str] = {}
    ids: dict[int, str] = {}
    for event in [*before, *split(rest)][1:-1]:
        answer = json.loads(event.removeprefix(b"data: "))
        assert answer["created"] == 1
        for name, value in answer["choices"][0]["delta"].items():
            if name != "tool_calls":
                said[name] = said.get(name, "") + value
                continue
            for one in value:
                assert one["index"] not in ids or "id" not in one, "one header for each"
                ids.setdefault(one["index"], one.get("id", ""))
                for part, text in one["function"].items():
                    said[(one["index"], part)] = said.get((one["index"], part), "") + text
    assert said == {
        "reasoning": "Hm, 😀",
        "content": "I call",
        (0, "name"): "look",
        (0, "arguments"): '{"a": 1}',
        (1, "name"): "look",
        (1, "arguments"): "{}",
        (2, "name"): "see",
        (2, "arguments"): "{}",
    }
    begun = {index for index, at in ((0, 6), (1, 9), (2, 9)) if cut > at}
    assert ids == {index: f"{'first' if index in begun else 'second'}-{index}" for index in range(3)}


@pytest.mark.parametrize(
    "other",
    [
        [(1, "a"), (9, "b"), (3, "c")],  # another token of the same text
        [(1, "a"), (2, "x"), (3, "c")],
        [(1, "a")],  # its end comes before the client's
    ],
)
def test_another_answer_is_an_error(other: Tokens) -> None:
    form = Form(chat=True, ids=True)
    before = split(form.stream([(1, "a"), (2, "b"), (3, "c")]))[:3]
    with pytest.raises(StageError, match="another answer"):
        rest_of(given_of(*before), form.stream(other))


def without_ids(events: bytes) -> bytes:
    return sse.without_ids(b"".join(event for event in split(events) if not Event(event).only_ids))


@drawn(answers, st.booleans())
def test_a_client_that_asks_for_no_ids_gets_the_bytes_that_it_would_get_without(tokens: Tokens, chat: bool) -> None:
    asked, plain = Form(chat=chat, ids=True), Form(chat=chat)
    assert without_ids(asked.stream(tokens)) == plain.stream(tokens)


def test_ids_in_the_text_of_an_answer_stay() -> None:
    event = Form(chat=True).event([(1, '"token_ids":[1],"prompt_token_ids":[2]'), (2, '"delta":{},"logprobs":null')])
    assert without_ids(event) == event


def test_events_that_are_there_for_the_ids_alone_are_left_out() -> None:
    silent = b'data: {"choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":null,"token_ids":[5]}]}\n\n'
    ends = silent.replace(b'"finish_reason":null', b'"finish_reason":"stop"')
    assert without_ids(silent + ends) == ends.replace(b"[5]", b"null")


def test_the_ids_of_the_prompt_are_left_out() -> None:
    event = b'data: {"choices":[],"prompt_token_ids":[1,2,3],"prompt_text":null}\n\n'
    assert without_ids(event) == b'data: {"choices":[],"prompt_token_ids":null,"prompt_text":null}\n\n'


@pytest.mark.parametrize(
    "choice",
    [
        {"delta": {"content": "a"}},  # hidden ids
        {"delta": {"content": "a"}, "token_ids": None},
        {"delta": {"audio": {"data": "x"}}, "token_ids": [1]},
        {"delta": {"content": "a"}, "token_ids": [-1]},
        {"delta": {"content": 1}, "token_ids": [1]},
    ],
)
def test_after_what_cannot_be_cut_nobody_goes_on(choice: dict[str, Any]) -> None:
    given = given_of(b"data: " + json.dumps({"choices": [{"index": 0, **choice}]}).encode() + b"\n\n")
    assert given.begun and not given.goes_on and given.why_not


def test_what_is_kept_is_counted_and_given_back() -> None:
    room = HistoryRoom(MigrationLimits())
    given, chunk = TokenHistory(room), Event(Form(chat=True, ids=True).event([(7, "word ")])).chunk
    given.begin()
    for _ in range(1000):
        given.add(chunk)
    assert given.tokens.tolist() == [7] * 1000 and given.texts == {"content": b"word " * 1000}
    assert room.held_bytes == STREAM_BYTES + 13 * 1000
    given.close()
    assert room.held_bytes == 0


def test_what_is_too_long_is_not_kept() -> None:
    room = HistoryRoom(MigrationLimits(stream_bytes=1000, process_bytes=2 * STREAM_BYTES))
    given, chunk = TokenHistory(room), Event(Form(chat=True, ids=True).event([(7, "word ")])).chunk
    given.begin()
    for _ in range(1000):
        given.add(chunk)
    assert not given.goes_on and room.held_bytes == 0
    streams = [TokenHistory(room) for _ in range(3)]
    for one in streams:
        one.begin()
    assert [one.goes_on for one in streams] == [True, True, False] and streams[2].begun
    streams[2].close()
    assert room.held_bytes == 2 * STREAM_BYTES


def read(event: bytes) -> Any:
    return json.loads(event.removeprefix(b"data:"))


def event_of(**choice: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, **choice}]}).encode() + b"\n\n"


@drawn(forms, answers, numbers, st.sampled_from(SPACED))
def test_ids_are_taken_out_however_events_are_spaced(
    form: Form, tokens: Tokens, merges: list[int], style: Mapping[str, Any]
) -> None:
    bare = Form(chat=form.chat, logprobs=form.logprobs, usage=form.usage)
    stream = respaced(form.stream(tokens, merges), **style)
    expected = split(bare.stream(tokens, merges))[:-1]
    assert [read(one) for one in split(without_ids(stream))[:-1]] == [read(one) for one in expected]


SILENT: Mapping[str, Any] = {"delta": {}, "logprobs": None, "finish_reason": None, "token_ids": [5]}


@pytest.mark.parametrize("style", SPACED, ids=str)
def test_what_says_nothing_but_ids_is_left_out_and_what_ends_or_is_likely_is_not(style: Mapping[str, Any]) -> None:
    silent, ends = event_of(**SILENT), event_of(**{**SILENT, "finish_reason": "stop"})
    likely = event_of(**{**SILENT, "logprobs": {"content": []}})
    assert without_ids(respaced(silent, **style)) == b""
    left = split(without_ids(respaced(silent + ends + silent + likely, **style)))
    assert [read(one)["choices"][0]["finish_reason"] for one in left] == ["stop", None]


@pytest.mark.parametrize("said", ['"token_ids": [1, 2]', "token_ids", '"token_ids":[', '"delta": {}'])
@pytest.mark.parametrize("style", SPACED, ids=str)
def test_text_that_looks_like_ids_is_text(style: Mapping[str, Any], said: str) -> None:
    event = respaced(event_of(delta={"content": said}, token_ids=[5]), **style)
    assert read(without_ids(event))["choices"] == [{"index": 0, "delta": {"content": said}, "token_ids": None}]
