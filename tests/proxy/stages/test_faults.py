"""The same 500 from two live instances is the body's fault: a 400, and held against none of them."""

from __future__ import annotations

import pytest

from proxy.request.parse import Endpoint
from proxy.stages.circuits import CircuitLimits, State
from proxy.stages.poison import GENERIC
from tests.proxy.fakes import DONE, Cluster, cluster, image_body, refuses, streams, text_body

CHAT = Endpoint.CHAT.value
SAID = "'str' object has no attribute 'get'"


def circuits(c: Cluster) -> set[State]:
    return {c.pipeline.circuits.state(name, one.incarnation) for name, one in c.instances.items()}


async def test_the_same_words_of_two_instances_are_a_400_that_tells_them_and_nobody_is_suspected() -> None:
    async with cluster("PD0", "PD1", "PD2") as c:
        c.pipeline.circuits._limits = CircuitLimits(failures=1, open_s=1000.0, open_max_s=1000.0)
        for stage in c.stages.values():
            stage.usual = refuses(500, SAID)
        for _ in range(3):
            response = await c.client.post(CHAT, json=text_body())
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (400, "same_fault") and SAID in error["message"]
            assert circuits(c) == {State.CLOSED}
        assert sum(len(stage.calls) for stage in c.stages.values()) == 6, "two of them are enough"
        assert c.metric("epd_proxy_suspects", state="suspected") == 0


@pytest.mark.parametrize("stages", [("E0", "PD0"), ("E0", "E1", "PD0")])
async def test_what_an_encoder_says_of_a_body_counts_too(stages: tuple[str, ...]) -> None:
    async with cluster(*stages) as c:
        c.pipeline.circuits._limits = CircuitLimits(failures=1, open_s=1000.0, open_max_s=1000.0)
        for stage in c.stages.values():
            stage.usual = refuses(500, SAID)
        response = await c.client.post(CHAT, json=image_body())
        assert (response.status_code, response.json()["error"]["code"]) == (400, "same_fault")
        assert circuits(c) == {State.CLOSED}
        assert all(len(stage.calls) == 1 for stage in c.stages.values())


async def test_other_words_or_a_lone_instance_are_a_502_as_ever() -> None:
    async with cluster("PD0", "PD1") as c:
        c["PD0"].usual, c["PD1"].usual = refuses(500, "one"), refuses(500, "another")
        assert (await c.client.post(CHAT, json=text_body())).status_code == 502
    async with cluster("PD0") as c:
        c["PD0"].usual = refuses(500, SAID)
        assert (await c.client.post(CHAT, json=text_body())).status_code == 502


async def test_what_an_engine_could_not_do_is_never_the_body_s_fault() -> None:
    async with cluster("PD0", "PD1") as c:
        for stage in c.stages.values():
            stage.usual = refuses(500, GENERIC.removeprefix("500: "))
        assert (await c.client.post(CHAT, json=text_body())).status_code == 502


async def test_answers_that_two_stages_gave_up_as_they_ended_are_not_the_body_s_fault() -> None:
    async with cluster("PD0", "PD1") as c:
        for stage in c.stages.values():
            stage.usual = streams(b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"abort"}]}\n\n', DONE)
        assert (await c.client.post(CHAT, json=text_body(stream=True))).status_code == 502


async def test_two_tokenizers_that_fail_alike_are_a_400() -> None:
    async with cluster("P0", "D0") as c:
        for stage in c.stages.values():
            stage.usual = refuses(500, SAID)
        response = await c.client.post("/tokenize", json={"prompt": "x"})
        assert response.status_code == 400 and SAID in response.json()["error"]["message"]
