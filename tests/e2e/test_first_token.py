"""Streams whose first token is prefill's and whose rest is decode's: a client cannot tell them from plain vLLM's."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from epd_serve.demo.presets import builtin_model_dir
from epd_serve.kv.faults import here_of
from tests.e2e.bodies import SOLO, Body, about, chat
from tests.e2e.demo_prompts import PAIRWISE_DIFFERENT, TEXT_ONLY
from tests.e2e.serving import MODEL, Endpoint, Serving
from tests.waiting import wait_for

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
SHOWN = 'epd_proxy_first_tokens_total{stage="P"}'
KEPT = 'epd_proxy_first_token_streams_total{outcome="kept"}'
DONE_AT_DECODE = Path(f"/tmp/epd-first-token-{os.getpid()}-received")
DONE_AT_PREFILL = Path(f"/tmp/epd-first-token-{os.getpid()}-done")
PAUSES = f"pause=received:{DONE_AT_DECODE};pause=done:{DONE_AT_PREFILL}"
LOST = "seed=3;drop=FirstToken:0.6;double=FirstToken:0.5;drop=CancelAck:0.3;delay=Alive:0.3s"

epd = pytest.mark.parametrize("launch", ["(E-P)-D"], indirect=True)
TEXT = chat(TEXT_ONLY[0][0])
PICTURE = about(PAIRWISE_DIFFERENT[4])
SCHEMA = {"type": "object", "properties": {"colour": {"enum": ["red", "green"]}}, "required": ["colour"]}
ATTEMPTS = 5
SEEDED = {"temperature": 1.0, "seed": 11, "max_tokens": 12}


def completion(**more: Any) -> Body:
    return {"model": MODEL, "prompt": "The shapes are", "temperature": 0, "max_tokens": 8, **more}


def events(endpoint: Endpoint, path: str, body: Body) -> list[Any]:
    """All events of a streamed answer, without what differs from one answer to the next."""
    found: list[Any] = []
    with endpoint.client.stream("POST", endpoint.url + path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()[:500]
        for line in response.iter_lines():
            if line == "data: [DONE]":
                return found
            if line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                found.append({name: event[name] for name in event if name not in ("id", "created")})
    raise AssertionError("the stream ended without [DONE]")


def meaning(found: list[Any]) -> dict[str, Any]:
    """What a client gathers from events, however tokens were merged into them."""
    choices = [choice for event in found for choice in event["choices"]]
    choices.sort(key=lambda choice: choice["index"])  # answers to several prompts come in any order
    said = [choice.get("logprobs") or {} for choice in choices]
    return {
        "text": "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices),
        "ids": [token for choice in choices for token in choice.get("token_ids") or []],
        "prompt": [event["prompt_token_ids"] for event in found if event.get("prompt_token_ids")]
        + [choice["prompt_token_ids"] for choice in choices if choice.get("prompt_token_ids")],
        "tokens": [one["token"] for each in said for one in each.get("content") or []]
        + [token for each in said for token in each.get("tokens") or []],
        "offsets": [offset for each in said for offset in each.get("text_offset") or []],
        "ends": [(one["finish_reason"], one["stop_reason"]) for one in choices if one["finish_reason"]],
        "usage": [event["usage"] for event in found if event.get("usage") and not event["choices"]],
        "roles": [choice["delta"]["role"] for choice in choices if "role" in choice.get("delta", {})],
    }


def assert_streams_alike(
    launch: Serving, monolith: Endpoint, body: Body, *, path: str = CHAT, shown: bool = True
) -> None:
    """The launch streams what plain vLLM does; `shown`: with the first token of its prefill instance. Where others have
    the cores, decode may be sooner now and then, which is right as well."""
    before, right = launch.metric(SHOWN), meaning(events(monolith, path, body))
    for _ in range(ATTEMPTS if shown else 1):
        assert meaning(events(launch, path, body)) == right
        if launch.metric(SHOWN) > before:
            break
    assert (launch.metric(SHOWN) > before) is shown


@epd
@pytest.mark.parametrize("name", ["text", "one picture", "three pictures of different sizes", "a long prompt"])
def test_a_stream_begins_with_prefills_token_and_is_plain_vllms(launch: Serving, monolith: Endpoint, name: str) -> None:
    before = launch.metric(KEPT)
    assert_streams_alike(launch, monolith, {**SOLO[name], "stream_options": {"include_usage": True}})
    assert launch.metric(KEPT) > before and not launch.metric(KEPT.replace("kept", "other"))


FORMS: dict[str, Body] = {
    "no ids": {"return_token_ids": False},
    "seed": SEEDED,
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 1.0, "repetition_penalty": 1.3},
    "top_k and min_p": {**SEEDED, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "usage all along": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "several tokens an event": {"stream_interval": 3},
    "a stop string of one character": {"stop": ["."]},
    "a stop string that begins with another letter": {"stop": ["xyz"]},
    "at least some tokens": {"min_tokens": 6},
    "json": {"response_format": {"type": "json_schema", "json_schema": {"name": "c", "schema": SCHEMA}}},
}


@epd
@pytest.mark.parametrize("form", FORMS)
def test_whatever_is_asked_of_the_answer(launch: Serving, monolith: Endpoint, form: str) -> None:
    assert_streams_alike(launch, monolith, {**TEXT, **FORMS[form]})


@epd
def test_completions(launch: Serving, monolith: Endpoint) -> None:
    for more in ({}, {**SEEDED, "logprobs": 2, "return_token_ids": True}, {"prompt": [1, 700, 205, 499]}):
        assert_streams_alike(launch, monolith, completion(**more), path=COMPLETIONS)


@epd
def test_what_waits_for_decode(launch: Serving, monolith: Endpoint) -> None:
    text = TEXT_ONLY[0][1]
    assert_streams_alike(launch, monolith, {**TEXT, "stop": [text[4] + "…"]}, shown=False)
    assert_streams_alike(launch, monolith, completion(prompt=["a", "b"]), path=COMPLETIONS, shown=False)
    before = launch.metric(SHOWN)
    body = {"model": MODEL, "input": "Hello", "max_output_tokens": 8, "temperature": 0}
    found = launch.post(RESPONSES, {**body, "stream": True}).text
    assert "response.completed" in found and launch.metric(SHOWN) == before


@epd
def test_a_character_in_several_tokens_waits_for_decode(launch: Serving, monolith: Endpoint) -> None:
    """Forced by its bytes: an answer of which no token is a whole character."""
    vocabulary = json.loads((Path(builtin_model_dir()) / "tokenizer.json").read_text())["model"]["vocab"]
    part = vocabulary["Ã"]  # byte 0xC3, as the tokenizer writes bytes
    body = {**TEXT, "logit_bias": {str(part): 100}, "max_tokens": 3}
    assert_streams_alike(launch, monolith, body, shown=False)


@epd
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_one_token_is_prefills_answer_and_decode_hears_nothing_of_it(
    launch: Serving, monolith: Endpoint, stream: bool
) -> None:
    body, began = {**PICTURE, "max_tokens": 1}, launch.stage("D0").metric("vllm:request_success_total")
    if stream:
        assert_streams_alike(launch, monolith, {**body, "stream_options": {"include_usage": True}})
    else:
        mine, theirs = (endpoint.post(CHAT, body).json() for endpoint in (launch, monolith))
        assert mine["choices"] == theirs["choices"] and mine["usage"] == theirs["usage"]
    assert launch.stage("D0").metric("vllm:request_success_total") == began


@epd
def test_an_answer_that_ends_with_its_first_token_is_prefills(launch: Serving, monolith: Endpoint) -> None:
    first = events(monolith, CHAT, TEXT)[1]["choices"][0]
    for more in ({"stop": first["delta"]["content"]}, {"stop_token_ids": first["token_ids"]}):
        assert_streams_alike(launch, monolith, {**TEXT, **more, "stream_options": {"include_usage": True}})
    for instance in ("P0", "D0"):
        wait_for(lambda i=instance: launch.kv_blocks_in_use(i) == 0, f"{instance} to free its blocks", 15)


@epd
def test_a_client_that_leaves_after_the_first_token_leaves_nothing_behind(launch: Serving) -> None:
    body = {**TEXT, "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with launch.client.stream("POST", launch.url + CHAT, json=body) as response:
        for line in response.iter_lines():
            if '"content":"' in line and '"content":""' not in line:
                break
    for instance in ("P0", "D0"):
        wait_for(lambda i=instance: launch.requests_inside(i) == 0, f"{instance} to drop the request", 15)
        wait_for(lambda i=instance: launch.kv_blocks_in_use(i) == 0, f"{instance} to free its blocks", 15)


# --- faults -------------------------------------------------------------------------------------------------------


@pytest.fixture
def holds() -> Iterator[Callable[[Path], None]]:
    """Stops the next one that reaches a point; all are let go at the end."""

    def hold(path: Path) -> None:
        path.with_suffix(".new").write_text("1")
        path.with_suffix(".new").rename(path)

    yield hold
    for path in (DONE_AT_DECODE, DONE_AT_PREFILL):
        path.unlink(missing_ok=True)
        here_of(path).unlink(missing_ok=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launch", "dies", "held"),
    [
        (("P-2D", "--kv-faults", PAUSES), "D", DONE_AT_DECODE),
        (("2P-D", "--kv-faults", PAUSES), "P", DONE_AT_PREFILL),
    ],
    ids=["decode", "prefill"],
    indirect=["launch"],
)
def test_a_stage_that_dies_after_the_first_token_costs_the_client_nothing(
    launch: Serving, monolith: Endpoint, holds: Callable[[Path], None], dies: str, held: Path
) -> None:
    right = meaning(events(monolith, CHAT, TEXT))
    assert meaning(events(launch, CHAT, TEXT)) == right, "links are up"
    before = launch.metric(SHOWN)
    holds(held)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(events, launch, CHAT, TEXT)
        wait_for(here_of(held).exists, "the KV to be on its way", 60)
        wait_for(lambda: launch.metric(SHOWN) > before, "the first token to be shown", 60)
        names = [name for name in launch.instances() if name[0] == dies]
        wait_for(lambda: any(map(launch.kv_blocks_in_use, names)), "somebody to hold the request's KV", 15)
        launch.signal_stage(next(filter(launch.kv_blocks_in_use, names)), signal.SIGKILL)
        here_of(held).unlink()
        assert meaning(answer.result(120)) == right
    assert launch.metric("epd_proxy_retries_total") >= 1


@pytest.mark.slow
@pytest.mark.parametrize("launch", [("P-D", "--kv-faults", LOST)], indirect=True, ids=["lost"])
def test_first_tokens_that_get_lost_late_or_doubled_on_their_way_to_decode(launch: Serving, monolith: Endpoint) -> None:
    bodies = [chat(text, max_tokens=6) for text, _ in TEXT_ONLY] * 3
    right = [meaning(events(monolith, CHAT, body)) for body in bodies]
    with ThreadPoolExecutor(4) as pool:
        assert [meaning(found) for found in pool.map(lambda body: events(launch, CHAT, body), bodies)] == right
    for instance in ("P0", "D0"):
        wait_for(lambda i=instance: launch.kv_blocks_in_use(i) == 0, f"{instance} to free its blocks", 30)
