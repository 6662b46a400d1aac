"""Two real stages with both halves of the KV connector: either prefills for the other, whatever it did before."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.bodies import FIRST, Body, chat, conversation, fresh
from tests.e2e.serving import Serving, serving
from tests.waiting import wait_for

_numbers = itertools.count()


@pytest.fixture(scope="module")
def launch() -> Iterator[Serving]:
    with serving("P-D", "--switchable") as made:
        yield made


def ask(launch: Serving, p: str, d: str, body: Body) -> list[int]:
    """The tokens of one request that `p` prefills and `d` decodes, past the proxy."""
    transfer = f"transfer{next(_numbers)}"
    life = launch.instances()[p]["incarnation"]
    peer = {"instance": p, "incarnation": life, "endpoint": f"ipc://{launch.run}/{p}.kv"}
    to_p = {**body, "max_tokens": 1, "kv_transfer_params": {"transfer_id": transfer, "incarnation": life}}
    to_d = {**body, "kv_transfer_params": {"transfer_id": transfer, "peer": peer}}
    headers = {"X-Request-Id": transfer}
    path = "/v1/chat/completions"
    with ThreadPoolExecutor(1) as beside:
        prefilled = beside.submit(launch.stage(p).post, path, to_p, headers=headers)
        answer = launch.stage(d).post(path, to_d, headers=headers)
        assert prefilled.result().json()["kv_transfer_params"] == {"ok": True, "reason": ""}
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


def bodies() -> list[Body]:
    greedy = [chat("Hello"), conversation(4, FIRST), conversation(1), fresh(430)]
    return [*greedy, *({**body, "temperature": 1.0, "seed": 11} for body in greedy)]


def test_tokens_are_the_same_whichever_part_an_instance_takes(launch: Serving) -> None:
    before = [ask(launch, "P0", "D0", body) for body in bodies()]
    after = [ask(launch, "D0", "P0", body) for body in bodies()]
    assert after == before
    assert [ask(launch, "P0", "D0", body) for body in bodies()] == before


def test_both_parts_at_once_and_nothing_remains(launch: Serving) -> None:
    """As in the moments after a flip: each still decodes what the other one prefilled, and the reverse."""
    greedy = bodies()[:4]  # near-ties of what is drawn are rounded differently from batch to batch
    expected = [ask(launch, "P0", "D0", body) for body in greedy]
    pairs = [("P0", "D0"), ("D0", "P0")]
    with ThreadPoolExecutor(16) as threads:
        asked = [threads.submit(ask, launch, *pairs[at % 2], body) for at, body in enumerate(2 * greedy)]
        again = [threads.submit(ask, launch, *pairs[1 - at % 2], body) for at, body in enumerate(2 * greedy)]
        assert [one.result() for one in asked] == 2 * expected
        assert [one.result() for one in again] == 2 * expected
    for name in ("P0", "D0"):
        wait_for(lambda name=name: launch.kv_blocks_in_use(name) == 0.0, f"{name} to give its blocks back")


def test_the_proxy_goes_on_with_the_first_token_as_ever(launch: Serving) -> None:
    body = bodies()[0]
    with launch.client.stream("POST", launch.url + "/v1/chat/completions", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200 and "[DONE]" in "".join(answer.iter_text())


def test_a_stage_that_is_told_to_end_finishes_what_it_has(launch: Serving) -> None:
    body = {**chat("Hello"), "stream": True, "max_tokens": 60, "ignore_eos": True}
    stage, life = launch.stage("D0"), launch.instances()["D0"]["incarnation"]
    with stage.client.stream("POST", stage.url + "/v1/chat/completions", json=body) as answer:
        lines = answer.iter_lines()
        assert next(lines)
        os.killpg(launch.stage_pid("D0"), signal.SIGTERM)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    wait_for(lambda: launch.instances()["D0"]["incarnation"] != life, "another life of D0")
    wait_for(launch.healthy, "D0 to be back", 120)
