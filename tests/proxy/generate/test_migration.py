"""Which streams can go on at another stage, in which way, and how many at once."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from proxy.config.limits import MigrationLimits
from proxy.config.settings import ModelIdentity, ProxySettings
from proxy.generate.recovery import MigrationPace, Way, way_on, why_not
from proxy.request.parse import Endpoint, ParsedRequest, parse
from proxy.stages.history import HistoryRoom, TokenHistory
from tests.proxy.fakes import MODEL, text_body

SETTINGS = ProxySettings(served_models=(MODEL,), identity=ModelIdentity(MODEL))


def request(endpoint: Endpoint = Endpoint.CHAT, **more: Any) -> ParsedRequest:
    body = text_body(stream=True, **more)
    if endpoint is not Endpoint.CHAT:
        name = "prompt" if endpoint is Endpoint.COMPLETIONS else "input"
        body = {name: "hello", **{key: value for key, value in body.items() if key not in ("messages", "max_tokens")}}
    return parse(endpoint, json.dumps(body).encode(), SETTINGS)


def given(
    *, flags: tuple[str, ...] = (), tokens: int = 4, finished: bool = False, counted: bool = False
) -> TokenHistory:
    one = TokenHistory(HistoryRoom(MigrationLimits()))
    one.begun, one.flags, one.finished, one.counted = True, flags, finished, counted
    one.tokens.extend(range(tokens))
    return one


@pytest.mark.parametrize(
    ("endpoint", "more"),
    [
        (Endpoint.CHAT, {"n": 2}),
        (Endpoint.CHAT, {"include_reasoning": False}),
        (Endpoint.COMPLETIONS, {"prompt": ["a", "b"]}),
        (Endpoint.COMPLETIONS, {"prompt": [[1], [2]]}),
        (Endpoint.COMPLETIONS, {"echo": True}),
        (Endpoint.COMPLETIONS, {"use_beam_search": True}),
        (Endpoint.RESPONSES, {}),
    ],
    ids=repr,
)
def test_what_does_not_go_on_says_so(endpoint: Endpoint, more: dict[str, Any]) -> None:
    assert "go on" in why_not(request(endpoint, **more))


@pytest.mark.parametrize("prompt", ["hello", [1, 2, 3]])
def test_one_answer_to_one_prompt_goes_on(prompt: Any) -> None:
    assert not why_not(request(Endpoint.COMPLETIONS, prompt=prompt)) and not why_not(request(tools=[], seed=1))


@pytest.mark.parametrize(
    "more",
    [
        {"seed": 0},
        {"logprobs": True, "top_logprobs": 0},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -1},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a*"}},
        {"bad_words": ["a"]},
        {"tools": [{"type": "function", "function": {"name": "look"}}]},
        {"thinking_token_budget": 5},
        {"min_tokens": 5},
        {"repetition_detection": {"min_count": 2}},
    ],
    ids=repr,
)
def test_what_hangs_on_how_tokens_were_sampled_is_replayed(more: dict[str, Any]) -> None:
    assert way_on(request(**more), given()) is Way.REPLAY


@pytest.mark.parametrize(
    "more",
    [
        {}, {"temperature": 1.0, "top_p": 0.5}, {"repetition_penalty": 1.2}, {"stop": ["User:"]}, {"min_tokens": 4},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "logprobs": False, "seed": None, "tools": []},
        {"stream_options": {"include_usage": True}}, {"return_token_ids": True}, {"ignore_eos": True},
    ],
    ids=repr,
)  # fmt: skip
def test_all_else_is_prefilled_unless_the_operator_says_otherwise(more: dict[str, Any]) -> None:
    assert way_on(request(**more), given()) is Way.FAST
    assert way_on(request(**more), given(), "replay") is Way.REPLAY


def test_completions_logprobs_of_no_alternatives_are_logprobs() -> None:
    assert way_on(request(Endpoint.COMPLETIONS, logprobs=0), given()) is Way.REPLAY


def test_parsers_see_every_token_of_a_chat() -> None:
    flags = ("--reasoning-parser qwen3",)
    assert way_on(request(), given(flags=flags)) is Way.REPLAY
    assert way_on(request(Endpoint.COMPLETIONS), given(flags=flags)) is Way.FAST


def test_a_finished_answer_lacks_its_usage_or_nothing() -> None:
    counts = request(stream_options={"include_usage": True})
    assert way_on(request(), given(finished=True)) is Way.NONE
    assert way_on(counts, given(finished=True)) is Way.REPLAY
    assert way_on(counts, given(finished=True, counted=True)) is Way.NONE
    assert way_on(request(), given(finished=True, flags=("--enable-force-include-usage",))) is Way.REPLAY


async def test_streams_move_at_a_pace_and_in_order() -> None:
    loop, pace = asyncio.get_running_loop(), MigrationPace(MigrationLimits(per_s=50, burst=3))
    begun, order = loop.time(), list[int]()

    async def move(number: int) -> float:
        await pace.turn()
        order.append(number)
        return loop.time() - begun

    after_s = await asyncio.gather(*(move(number) for number in range(6)))
    assert order == [0, 1, 2, 3, 4, 5]
    assert all(after >= (number - 2) / 50 - 0.001 for number, after in enumerate(after_s))
    leaves = asyncio.create_task(pace.turn())
    await asyncio.sleep(0)
    leaves.cancel()
    await asyncio.wait_for(pace.turn(), 10)
