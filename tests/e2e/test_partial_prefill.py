"""A request whose images are not all encoded yet is prefilled up to the first that is not, on real stages.

The stages are asked past the proxy, which decides when each image is encoded.
"""

from __future__ import annotations

import contextlib
import hashlib
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from epd_serve.wire import ON_MISSING_FAIL, ON_MISSING_XARG
from tests.e2e.bodies import Body, ask, chat, conversation, fresh_prompt, image_part, png, tokens
from tests.e2e.demo_prompts import WHAT
from tests.e2e.engine_facts import METADATA_TRAVELS
from tests.e2e.serving import Endpoint, Serving, recomputed
from tests.waiting import wait_for

Solo = Callable[[Body], list[list[int]]]


def named(data: bytes) -> Body:
    """The picture under the name of its feature, as the proxy sends it to stages."""
    return {**image_part(data), "uuid": hashlib.sha256(data).hexdigest()}


def with_names(body: Body, pictures: list[bytes]) -> Body:
    """`body` with the pictures of its last turn under their names."""
    *before, last = body["messages"]
    content = [*map(named, pictures), last["content"][-1]]
    return {**body, "messages": [*before, {**last, "content": content}]}


def encode(encoder: Endpoint, body: Body, picture: bytes) -> None:
    asked = {"model": body["model"], "max_tokens": 1, "messages": [{"role": "user", "content": [named(picture)]}]}
    assert encoder.post("/v1/chat/completions", asked).status_code == 200


def pictures(*numbers: int) -> list[bytes]:
    return [png(fresh_prompt(number).picture()) for number in numbers]


def begun(launch: Serving, instance: str) -> int:
    return launch.counters(instance).get("partial_prefills", 0)


@pytest.mark.parametrize("launch", ["E-PD"], indirect=True)
@pytest.mark.promise("same-tokens")
def test_what_comes_before_an_awaited_image_is_prefilled_meanwhile(launch: Serving, solo_answer: Solo) -> None:
    shown = pictures(900, 901)
    body = conversation(4, *shown)
    alone, before, lost = solo_answer(body), begun(launch, "PD0"), recomputed(launch.settled_counters("PD0"))
    encoder, stage = launch.stage("E0"), launch.stage("PD0")
    encode(encoder, body, shown[0])
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, stage, with_names(body, shown))
        wait_for(lambda: begun(launch, "PD0") == before + 1, "PD0 to have begun", 1.5)
        assert launch.kv_blocks_in_use("PD0") > 0
        encode(encoder, body, shown[1])
        assert answer.result(timeout=60) == alone
    assert recomputed(launch.settled_counters("PD0")) == lost


@contextlib.contextmanager
def begun_at_p(launch: Serving, body: Body, shown: list[bytes], **more: Any) -> Iterator[list[Future[httpx.Response]]]:
    """P's and D's answers to a request of which P has computed what comes before its second picture."""
    before, incarnation = begun(launch, "P0"), launch.instances()["P0"]["incarnation"]
    peer = {"instance": "P0", "incarnation": incarnation, "endpoint": f"ipc://{launch.run}/P0.kv"}
    asked, transfer = {**with_names(body, shown), **more}, {"transfer_id": uuid.uuid4().hex}
    to_p = {**asked, "max_tokens": 1, "kv_transfer_params": {**transfer, "incarnation": incarnation}}
    to_d = {**asked, "kv_transfer_params": {**transfer, "peer": peer}}
    how = {"headers": {"X-Request-Id": uuid.uuid4().hex}, "timeout": 60}
    encode(launch.stage("E0"), body, shown[0])
    with ThreadPoolExecutor(2) as pool:
        bodies = {"P0": to_p, "D0": to_d}
        answers = [
            pool.submit(launch.stage(name).post, "/v1/chat/completions", sent, **how) for name, sent in bodies.items()
        ]
        wait_for(lambda: begun(launch, "P0") == before + 1, "P0 to have begun", 1.5)
        yield answers


@pytest.mark.slow
@pytest.mark.promise("same-tokens")
@pytest.mark.parametrize("launch", ["2E-P-D"], indirect=True)
def test_its_kv_travels_in_parts_too(launch: Serving, solo_answer: Solo) -> None:
    shown = pictures(902, 903)
    body = conversation(4, *shown)
    with begun_at_p(launch, body, shown) as (prefilled, decoded):
        encode(launch.stage("E1"), body, shown[1])
        assert tokens(decoded.result()) == solo_answer(body)
        assert prefilled.result().json()["kv_transfer_params"]["ok"]


@pytest.mark.slow
@pytest.mark.skipif(not METADATA_TRAVELS, reason="this vLLM cannot be told to fail a request")
@pytest.mark.parametrize("launch", ["2E-P-D"], indirect=True)
def test_a_request_that_has_begun_and_lacks_an_image_for_good_fails_at_both_ends(launch: Serving) -> None:
    shown = pictures(908, 909)
    only_whole = {"vllm_xargs": {ON_MISSING_XARG: ON_MISSING_FAIL}}
    with begun_at_p(launch, conversation(4, *shown), shown, **only_whole) as answers:
        assert [answer.result().status_code for answer in answers] == [500, 500]
    wait_for(lambda: launch.kv_blocks_in_use("P0") == launch.kv_blocks_in_use("D0") == 0, "all blocks to be free", 15)


@pytest.mark.slow
@pytest.mark.promise("encoded-once")
@pytest.mark.parametrize("launch", ["2E-P-D"], indirect=True)
def test_encoders_share_the_images_of_one_request(launch: Serving, solo_answer: Solo) -> None:
    def encoded() -> list[int]:
        return [launch.settled_counters(name).get("encoded", 0) for name in ("E0", "E1")]

    body, before = chat(WHAT, *pictures(904, 905, 906, 907)), encoded()
    assert ask(launch, body) == solo_answer(body)
    since = [after - former for after, former in zip(encoded(), before, strict=True)]
    assert since == [2, 2]
