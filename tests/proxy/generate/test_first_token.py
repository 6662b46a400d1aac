"""P's first token, and D's stream after it: the client gets what one stage alone would have streamed, however tokens
are merged and its bytes are cut; and what is shown ahead of D is never more than D will say."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from epd_serve.errors import StageError
from epd_serve.instances import Instance
from epd_serve.roles import Role
from epd_serve.wire import KV_NOT_SENT, TOKEN_SENT
from proxy.config.limits import MigrationLimits
from proxy.config.settings import ModelIdentity, ProxySettings
from proxy.errors import KvNotDelivered
from proxy.generate.recovery import alike, is_one_token, may_be_shown
from proxy.generate.relay import first_token, relay, show
from proxy.generate.router import Route
from proxy.registry.instance_state import Work
from proxy.registry.table import InstanceTable
from proxy.request.parse import Endpoint, ParsedRequest, parse
from proxy.routing.plan import Path
from proxy.stages.history import HistoryRoom, TokenHistory
from proxy.stages.sse import Event, split
from tests.proxy.fakes import DONE, MODEL, opening, text_body
from tests.proxy.generate.streams import (
    Form,
    Reader,
    Tokens,
    answers,
    forms,
    given_of,
    meaning,
    numbers,
    reads,
    rest_of,
)

SETTINGS = ProxySettings(served_models=(MODEL,), identity=ModelIdentity(MODEL))


async def merged(form: Form, tokens: Tokens, merges: Sequence[int], cuts: Sequence[int], *, d_first: bool) -> bytes:
    client, lock = Reader(asks=form.ids), asyncio.Lock()
    p = show(
        reads(form.first(tokens, f"{TOKEN_SENT}{tokens[0][0]}"), ()), client.client, {}, stage="P0", opening=lock,
        on_first=lambda: None, on_whole=lambda: None,
    )  # fmt: skip
    d = relay(reads(form.stream(tokens, merges), cuts), client.client, stage="D0", opening=lock)
    await asyncio.gather(*((d, p) if d_first else (p, d)))
    assert client.sink.finished and not client.sink.repeatable
    return client.got


@given(forms, answers, numbers, st.lists(st.integers(0, 2000), max_size=8), st.booleans())
def test_the_client_gets_one_stream_however_tokens_are_merged_and_bytes_are_cut(
    form: Form, tokens: Tokens, merges: list[int], cuts: list[int], d_first: bool
) -> None:
    got = asyncio.run(merged(form, tokens, merges, cuts, d_first=d_first))
    assert meaning(got) == meaning(form.stream(tokens))


@given(answers, numbers, st.integers(1, 4))
def test_text_that_decode_holds_back_for_a_stop_string_is_cut_where_it_comes(
    tokens: Tokens, merges: list[int], behind: int
) -> None:
    form, said = Form(chat=True, ids=True), "".join(text for _, text in tokens)
    late, shown = [], ""
    for number, (token, text) in enumerate(tokens):
        shown += text
        upto = len(shown) if number == len(tokens) - 1 else max(0, len(shown) - behind)
        late.append((token, shown[sum(len(text) for _, text in late) : upto]))
    if not tokens[0][1]:
        return
    cut = rest_of(given_of(form.event(tokens[:1])), form.stream(late, merges))
    found = meaning(cut)
    assert tokens[0][1] + found["text"] == said
    assert [tokens[0][0], *found["ids"]] == [token for token, _ in tokens]


def shown(event: bytes, **body: Any) -> bytes:
    """What the client may be shown of P's first event."""
    first = first_token(Event(event), body, stage="P0")
    return first.raw if first is not None else b""


async def test_what_was_shown_is_not_said_again_where_nothing_more_is_kept() -> None:
    form, tokens, client, lock = Form(chat=True, ids=True), [(7, "Hi"), (8, " you")], Reader(), asyncio.Lock()
    client.client.history = TokenHistory(HistoryRoom(MigrationLimits(process_bytes=1)))
    await show(
        reads(form.first(tokens, f"{TOKEN_SENT}7"), ()), client.client, {}, stage="P0", opening=lock,
        on_first=lambda: None, on_whole=lambda: None,
    )  # fmt: skip
    assert not client.client.history.goes_on
    await relay(reads(form.stream(tokens), range(0, 900, 50)), client.client, stage="D0", opening=lock)
    assert meaning(client.got) == meaning(form.stream(tokens))


def test_what_is_shown_looks_like_any_event_before_the_last() -> None:
    form = Form(chat=True, logprobs=True, ids=True)
    assert shown(split(form.first([(7, "Hi")], TOKEN_SENT + "7"))[1]) == form.event([(7, "Hi")])


@pytest.mark.parametrize(
    ("text", "stop", "shows"),
    [
        ("User", ["User:"], False),
        ("the Us", "User:", False),
        ("Users", ["User:"], True),
        ("a", ["\n", ";"], True),  # one character is there or not
        ("", [], False),  # part of a character, or a token without text
    ],
)
def test_what_may_not_be_said_after_all_is_not_shown(text: str, stop: Any, shows: bool) -> None:
    event = Form(chat=False).event([(7, text)], "length", TOKEN_SENT + "7")
    assert bool(shown(event, stop=stop)) is shows
    if text:
        assert shown(event, stop=stop, include_stop_str_in_output=True)


def test_what_a_parser_has_found_waits_for_decode() -> None:
    for delta in ({"reasoning": "Hm"}, {"content": "a", "tool_calls": [{"index": 0}]}):
        choice = {"index": 0, "delta": delta, "finish_reason": "length", "stop_reason": TOKEN_SENT + "7"}
        event = Form(chat=True).written(choices=[choice])
        assert shown(event) == b""


def test_an_end_that_says_nothing_of_a_transfer_is_not_shown() -> None:
    assert shown(Form(chat=True).event([(7, "a")], "length")) == b""
    assert shown(Form(chat=True).event([(7, "a")], "abort")) == b""


def test_prefill_that_could_not_send_its_kv_fails_the_attempt() -> None:
    event = Form(chat=True).event([(7, "a")], "length", KV_NOT_SENT + "cancelled by decode")
    with pytest.raises(KvNotDelivered) as caught:
        shown(event)
    assert caught.value.reason == "cancelled by decode" and caught.value.stage == "P0"


@pytest.mark.parametrize("rest", [[(7, "Ho")], [(7, "H")]])
def test_decode_that_says_something_else_is_an_error(rest: Tokens) -> None:
    with pytest.raises(StageError, match="another answer"):
        rest_of(given_of(Form(chat=True, ids=True).event([(7, "Hi")])), Form(chat=True).stream(rest))


async def test_an_answer_that_ends_with_its_first_token_is_all_prefills() -> None:
    form, client, left = Form(chat=True, usage=True), Reader(), []
    stream = (
        opening(0) + form.event([(2, "")], "stop") + form.written(choices=[], usage={"completion_tokens": 1}) + DONE
    )
    await show(
        reads(stream, range(0, 600, 7)), client.client, {}, stage="P0", opening=asyncio.Lock(),
        on_first=lambda: None, on_whole=lambda: left.append("D0"),
    )  # fmt: skip
    assert client.got == stream and client.sink.finished and left == ["D0"]


# --- what may be shown at all -------------------------------------------------------------------------------------


def request(endpoint: Endpoint = Endpoint.CHAT, **more: Any) -> ParsedRequest:
    body = text_body(stream=True, **more)
    if endpoint is not Endpoint.CHAT:
        name = "prompt" if endpoint is Endpoint.COMPLETIONS else "input"
        body = {name: "hello", **{key: value for key, value in body.items() if key not in ("messages", "max_tokens")}}
    return parse(endpoint, json.dumps(body).encode(), SETTINGS)


def route(prefill: tuple[str, ...] | None = (), decode: tuple[str, ...] | None = ()) -> Route:
    table = InstanceTable()
    for name, role, flags in (("P0", Role.P, prefill), ("D0", Role.D, decode)):
        table.apply(Instance(name, role, "http://x", "1", "ipc:///x", answer_flags=flags))
    return Route(Path(False, Role.P, Role.D), table.acquire("P0", Work.PREFILL), table.acquire("D0", Work.DECODE))


@pytest.mark.parametrize(
    "more",
    [{}, {"n": 1}, {"stop": "User:"}, {"logprobs": True}, {"response_format": {"type": "json_object"}}, {"seed": 1}],
    ids=repr,
)
def test_a_stream_of_one_answer_to_a_chat_is_shown_its_first_token(more: dict[str, Any]) -> None:
    assert may_be_shown(request(**more), route())


@pytest.mark.parametrize("more", [{"n": 2}, {"tools": [{"type": "function", "function": {"name": "f"}}]}], ids=repr)
def test_several_answers_and_tools_wait_for_decode(more: dict[str, Any]) -> None:
    assert not may_be_shown(request(**more), route())


def test_a_completion_is_shown_its_first_token_where_it_has_one_prompt() -> None:
    assert may_be_shown(request(Endpoint.COMPLETIONS), route())
    assert may_be_shown(request(Endpoint.COMPLETIONS, prompt=[1, 2]), route())
    assert not may_be_shown(request(Endpoint.COMPLETIONS, prompt=["a", "b"]), route())
    assert not may_be_shown(request(Endpoint.COMPLETIONS, prompt=[[1], [2]]), route())


def test_responses_and_whole_answers_wait_for_decode() -> None:
    assert not may_be_shown(request(Endpoint.RESPONSES), route())
    whole = parse(Endpoint.CHAT, json.dumps(text_body()).encode(), SETTINGS)
    assert not may_be_shown(whole, route())


@pytest.mark.parametrize(
    "flags", [("--reasoning-parser qwen3",), ("--enable-auto-tool-choice", "--tool-call-parser x")]
)
def test_chats_that_are_parsed_wait_for_decode_and_completions_do_not(flags: tuple[str, ...]) -> None:
    assert not may_be_shown(request(), route(flags, flags))
    assert may_be_shown(request(Endpoint.COMPLETIONS), route(flags, flags))


@pytest.mark.parametrize(("p", "d"), [(None, ()), ((), None), (None, None), (("--seed 1",), ("--seed 2",))], ids=repr)
def test_stages_that_may_answer_differently_have_no_part_in_one_answer(
    p: tuple[str, ...] | None, d: tuple[str, ...] | None
) -> None:
    assert not alike(route(p, d)) and not may_be_shown(request(), route(p, d))
    alone = route()
    assert alike(alone) and not alike(Route(alone.path, None, alone.decode))


@pytest.mark.parametrize(
    ("endpoint", "limits", "one"),
    [
        (Endpoint.CHAT, {"max_tokens": 1}, True),
        (Endpoint.CHAT, {"max_tokens": 1, "max_completion_tokens": 5}, False),
        (Endpoint.CHAT, {"max_tokens": 5, "max_completion_tokens": 1}, True),
        (Endpoint.CHAT, {"max_tokens": None}, False),
        (Endpoint.COMPLETIONS, {}, False),  # 16
        (Endpoint.COMPLETIONS, {"max_tokens": 1}, True),
        (Endpoint.RESPONSES, {"max_output_tokens": 1}, True),
        (Endpoint.RESPONSES, {}, False),
    ],
)
def test_one_token_is_what_the_client_asks_for(endpoint: Endpoint, limits: dict[str, Any], one: bool) -> None:
    found = request(endpoint)
    body = {**{name: value for name, value in found.body.items() if name != "max_tokens"}, **limits}
    assert is_one_token(_with(found, body)) is one


def _with(found: ParsedRequest, body: dict[str, Any]) -> ParsedRequest:
    return structs.replace(found, body=body)
