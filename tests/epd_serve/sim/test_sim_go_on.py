"""Simulated stages that go on after tokens of another one: the same answer, and a clear error for another's tokens."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from epd_serve.sim.profile import Line, Profile
from epd_serve.sim.prompts import CHAT, COMPLETIONS, RESPONSES
from tests.epd_serve.sim.served import MODEL, Layout, chat, layout, served
from tests.epd_serve.sim.test_stage_http import events

IDS = {"return_token_ids": True, "stream_options": {"include_usage": True}}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, chat(max_tokens=6, **IDS)),
    "completion": (COMPLETIONS, {"model": MODEL, "prompt": "hello", "max_tokens": 6, **IDS}),
    "logprobs": (CHAT, chat(max_tokens=6, logprobs=True, top_logprobs=1, **IDS)),
    "a stop text": (CHAT, chat(max_tokens=40, stop=[" more"], **IDS)),
}


def meaning(found: list[Any]) -> dict[str, Any]:
    """What a client gathers from a stream."""
    assert found.pop() == "[DONE]"
    choices = [choice for event in found for choice in event["choices"]]
    return {
        "text": "".join(one.get("text") or one.get("delta", {}).get("content") or "" for one in choices),
        "ids": [token for one in choices for token in one.get("token_ids") or ()],
        "logprobs": [entry for one in choices for entry in (one.get("logprobs") or {}).get("content", ())],
        "ends": [(one["finish_reason"], one["stop_reason"]) for one in choices if one["finish_reason"]],
        "usage": [event["usage"] for event in found if event.get("usage")],
        "opened": sum("role" in one.get("delta", {}) for one in choices),
    }


def after(tokens: list[int], *, replay: bool = False) -> dict[str, Any]:
    return {"kv_transfer_params": {"goes_on_after": tokens, **({"replay": True} if replay else {})}}


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("name", BODIES)
async def test_the_answer_is_the_undisturbed_one(name: str, replay: bool) -> None:
    path, body = BODIES[name]
    async with served() as (engine, client):
        right = meaning(await events(client, path, body))
        tokens = right["ids"]
        for cut in range(len(tokens) + replay):
            before = engine.steps
            assert meaning(await events(client, path, {**body, **after(tokens[:cut], replay=replay)})) == right
            assert engine.steps - before == (len(tokens) if replay else len(tokens) - cut)


async def test_what_was_given_comes_with_the_first_token_after_it() -> None:
    path, body = BODIES["chat"]
    async with served() as (_, client):
        tokens = meaning(await events(client, path, body))["ids"]
        found = await events(client, path, {**body, **after(tokens[:3])})
    assert [one["choices"][0].get("token_ids") for one in found[:4]] == [None, tokens[:4], tokens[4:5], tokens[5:]]


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("wrong", [[1], "swapped", "too many"])
async def test_the_tokens_of_another_answer_are_refused(wrong: Any, replay: bool) -> None:
    path, body = BODIES["chat"]
    async with served() as (_, client):
        tokens = meaning(await events(client, path, body))["ids"]
        given = {"swapped": [*tokens[1::-1]], "too many": [*tokens, tokens[0]]}.get(str(wrong), wrong)
        answer = await client.post(path, json={**body, **after(given, replay=replay)})
    assert answer.status_code == 400 and "goes_on_after" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat(n=2)),
        (COMPLETIONS, {"prompt": ["one", "two"], "max_tokens": 4}),
        (RESPONSES, {"model": MODEL, "input": "hello", "max_output_tokens": 4}),
    ],
)
async def test_several_answers_and_responses_do_not_go_on(path: str, body: dict[str, Any]) -> None:
    async with served() as (_, client):
        answer = await client.post(path, json={**body, **after([1])})
    assert answer.status_code == 400 and "goes_on_after" in answer.json()["error"]["message"]


@pytest.fixture
def shm() -> Iterator[Path]:
    path = Path(f"/dev/shm/epd-test-{secrets.token_hex(8)}-arena")
    yield path
    path.unlink(missing_ok=True)


async def pair(stages: Layout, at_p: list[int], at_d: list[int], *, replay: bool = False) -> tuple[Any, Any]:
    """What P and D answer; both are told what the client has."""
    to_p, to_d = stages.kv_params
    for body, tokens in ((to_p, at_p), (to_d, at_d)):
        more = {"goes_on_after": tokens, **({"replay": True} if replay else {})} if tokens else {}
        body["kv_transfer_params"] = {**body["kv_transfer_params"], **more}  # type: ignore[dict-item]
    headers, asked = {"x-request-id": "r"}, chat(max_tokens=6, return_token_ids=True)
    d = asyncio.create_task(stages.clients["D0"].post(CHAT, json={**asked, **to_d}, headers=headers))
    p = await stages.clients["P0"].post(CHAT, json={**asked, **to_p}, headers=headers)
    return p.json(), (await d).json()


async def test_the_kv_of_given_tokens_travels_with_that_of_the_prompt(tmp_path: Path, shm: Path) -> None:
    async with layout(tmp_path, shm, Profile(kv=Line(0.001))) as stages:
        _, right = await pair(stages, [], [])
        tokens = right["choices"][0]["token_ids"]
        steps = stages.engines["D0"].steps
        for at_p, replay in ((tokens[:4], False), ([], True)):
            p, d = await pair(stages, at_p, tokens[:4], replay=replay)
            assert p["kv_transfer_params"] == {"ok": True, "reason": ""}
            assert (d["choices"], d["usage"]) == (right["choices"], right["usage"])
            steps, took = stages.engines["D0"].steps, stages.engines["D0"].steps - steps
            assert took == (6 if replay else 2)


async def test_kv_of_the_prompt_alone_does_not_pass_for_that_of_more(tmp_path: Path, shm: Path) -> None:
    async with layout(tmp_path, shm) as stages:
        _, right = await pair(stages, [], [])
        _, d = await pair(stages, [], right["choices"][0]["token_ids"][:4])
        assert "KV load failure" in d["error"]["message"]
