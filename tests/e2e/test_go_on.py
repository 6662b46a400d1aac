"""An answer that was cut after so many tokens, gone on with by a stage: as a whole it is the undisturbed one."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.bodies import SOLO, Body, about
from tests.e2e.demo_prompts import PAIRWISE_DIFFERENT
from tests.e2e.serving import Endpoint, Serving
from tests.e2e.test_first_token import CHAT, COMPLETIONS, FORMS, SEEDED, TEXT, completion, events, meaning

one_stage = pytest.mark.parametrize("launch", ["EPD"], indirect=True)
USAGE: Body = {"stream_options": {"include_usage": True}}
PLAIN: dict[str, Body] = {
    "text": TEXT,
    "a picture": about(PAIRWISE_DIFFERENT[4]),
    "three pictures": SOLO["three pictures of different sizes"],
    "a long prompt": SOLO["a long prompt"],
    "repetition penalty": {**TEXT, "repetition_penalty": 1.3},
    "a stop string": {**TEXT, "stop": ["."]},
    "at least some tokens": {**TEXT, "min_tokens": 6},
    "three tokens": {**TEXT, "max_tokens": 3},
}
SAMPLED: dict[str, Body] = {name: {**TEXT, **form} for name, form in FORMS.items() if name != "no ids"}


_numbers = itertools.count()


def gone_on(stage: Endpoint, path: str, body: Body, tokens: list[int], **how: bool) -> dict[str, Any]:
    return meaning(events(stage, path, {**body, "kv_transfer_params": {"goes_on_after": tokens, **how}}))


def cuts(tokens: list[int]) -> list[int]:
    """After how many tokens: none, one, a half, all but the last."""
    return sorted({0, 1, len(tokens) // 2, len(tokens) - 1})


def assert_goes_on(stage: Endpoint, body: Body, path: str = CHAT, *, whole: bool = False, **how: bool) -> None:
    """`whole`: also after all of it."""
    right = meaning(events(stage, path, {**body, **USAGE}))
    tokens = right["ids"]
    for cut in [*cuts(tokens), *([len(tokens)] if whole else [])]:
        assert gone_on(stage, path, {**body, **USAGE}, tokens[:cut], **how) == right, f"cut after {cut}"


def first_ids(stage: Endpoint, body: Body, tokens: list[int]) -> list[int]:
    """The tokens of the first event that has some."""
    found = events(stage, CHAT, {**body, "kv_transfer_params": {"goes_on_after": tokens}})
    ids = (choice.get("token_ids") for event in found for choice in event["choices"])
    return next(filter(None, ids))


def of_a_pair(launch: Serving, body: Body, tokens: list[int], *, fast: bool, shown: bool = False) -> dict[str, Any]:
    """D's answer after `tokens`, past the proxy, with the KV of P; `shown`: P says the next one."""
    transfer, life = f"transfer{next(_numbers)}", launch.instances()["P0"]["incarnation"]
    peer = {"instance": "P0", "incarnation": life, "endpoint": f"ipc://{launch.run}/P0.kv"}
    given: Body = {"goes_on_after": tokens} if tokens else {}
    at_p = {"transfer_id": transfer, "incarnation": life, **(given if fast else {})}
    at_d = {"transfer_id": transfer, "peer": peer, **given, **({} if fast else {"replay": True})}
    if shown:
        at_p["first_token"] = at_d["first_token"] = True
    to_p = {**body, "max_tokens": 1, "kv_transfer_params": at_p}
    to_p = {**to_p, "stream": True} if shown else {**to_p, "stream_options": None}
    headers = {"X-Request-Id": transfer}
    with ThreadPoolExecutor(1) as beside:
        prefilled = beside.submit(launch.stage("P0").post, CHAT, to_p, headers=headers)
        stage = launch.stage("D0")
        stage.client.headers.update(headers)
        answer = meaning(events(stage, CHAT, {**body, "kv_transfer_params": at_d}))
        assert prefilled.result().status_code == 200, prefilled.result().text
    return answer


@one_stage
@pytest.mark.parametrize("name", PLAIN)
def test_tokens_that_are_made_prompt(launch: Serving, name: str) -> None:
    stage, body = launch.stage("EPD0"), PLAIN[name]
    assert_goes_on(stage, body)
    tokens = meaning(events(stage, CHAT, body))["ids"]
    first = first_ids(stage, body, tokens[:2])  # an API server that is late may have another token by then
    assert len(first) >= 3 and first == tokens[: len(first)], "with the first token after them: one prefill"


@one_stage
@pytest.mark.parametrize("name", ["a picture", *SAMPLED])
def test_tokens_that_are_sampled_again(launch: Serving, name: str) -> None:
    body = SAMPLED.get(name) or PLAIN[name]
    assert_goes_on(launch.stage("EPD0"), body, whole=True, replay=True)


@one_stage
def test_a_completion(launch: Serving) -> None:
    stage = launch.stage("EPD0")
    assert_goes_on(stage, completion(return_token_ids=True), COMPLETIONS)
    sampled = completion(return_token_ids=True, logprobs=2, **SEEDED)
    assert_goes_on(stage, sampled, COMPLETIONS, whole=True, replay=True)


@one_stage
def test_a_grammar_is_never_left_out(launch: Serving) -> None:
    assert_goes_on(launch.stage("EPD0"), SAMPLED["json"])


@one_stage
def test_other_tokens_are_gone_on_after_than_it_would_have_said(launch: Serving) -> None:
    stage = launch.stage("EPD0")
    undisturbed = meaning(events(stage, CHAT, TEXT))["ids"]
    others = undisturbed[3:6]
    for how in ({}, {"replay": True}):
        found = gone_on(stage, CHAT, TEXT, others, **how)["ids"]
        assert found[:3] == others and found != undisturbed and len(found) > 3


@pytest.mark.parametrize("launch", ["P-D"], indirect=True)
@pytest.mark.parametrize("name", ["text", "a picture", "a long prompt"])
def test_a_pair_with_the_kv_of_prompt_and_tokens(launch: Serving, name: str) -> None:
    body: Body = {**PLAIN[name], **USAGE}
    right = of_a_pair(launch, body, [], fast=True)
    for cut in cuts(right["ids"]):
        given = right["ids"][:cut]
        assert of_a_pair(launch, body, given, fast=True) == right
        assert of_a_pair(launch, body, given, fast=True, shown=True) == right
        assert of_a_pair(launch, body, given, fast=False) == right


@pytest.mark.parametrize("launch", ["P-D"], indirect=True)
@pytest.mark.parametrize("name", ["seed", "logprobs", "penalties", "json"])
def test_a_pair_that_samples_tokens_again(launch: Serving, name: str) -> None:
    body: Body = {**SAMPLED[name], **USAGE}
    right = of_a_pair(launch, body, [], fast=False)
    for cut in [*cuts(right["ids"]), len(right["ids"])]:
        assert of_a_pair(launch, body, right["ids"][:cut], fast=False) == right
