"""What a request is held to: whose word counts, how it is judged by that, and what is said of a wrong word."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from starlette.types import Receive, Send

from epd_serve.errors import ConfigError
from proxy.config.keys import ApiKeys
from proxy.config.limits import KeyLimits, Slo
from proxy.records.record import Record
from proxy.request.parse import Endpoint
from tests.proxy.fakes import (
    MODEL,
    Behaviour,
    Call,
    Cluster,
    FakeStage,
    answer,
    api_keys,
    chunk,
    cluster,
    image_body,
    settings,
    text_body,
)

CHAT = Endpoint.CHAT.value
TTFT, TPOT = "x-epd-slo-ttft-ms", "x-epd-slo-tpot-ms"
DONE = b"data: [DONE]\n\n"


def recorded(c: Cluster) -> list[Record]:
    """Of all that end from now on."""
    records: list[Record] = []
    c.pipeline.records.ended.append(records.append)
    return records


def after(seconds: float, then: Behaviour) -> Behaviour:
    async def behave(stage: FakeStage, call: Call, receive: Receive, send: Send) -> None:
        await asyncio.sleep(seconds)
        await then(stage, call, receive, send)

    return behave


NAMED = list(itertools.product((False, True), repeat=3))


@pytest.mark.parametrize(("client", "key", "model"), NAMED)
async def test_the_client_s_word_counts_before_its_key_s_and_that_before_the_model_s(
    client: bool, key: bool, model: bool
) -> None:
    """And the deployment's where nobody said anything; of each of the two objectives apart."""
    config = settings(
        served_models=(MODEL, "another"),
        slo=Slo(ttft_s=40.0, tpot_s=4.0),
        model_slos=(f"{MODEL}=30000:3000", "another=1:1") if model else ("another=1:1",),
        key_limits=KeyLimits(slo_ttft_ms=20_000, slo_tpot_ms=2000) if key else KeyLimits(),
    )
    usual = (20.0, 2.0) if key else (30.0, 3.0) if model else (40.0, 4.0)
    async with cluster("PD0", config=config) as c:
        records = recorded(c)
        named = {TTFT: "10000", TPOT: "1000"} if client else {}
        for headers in (named, dict(list(named.items())[:1]), dict(list(named.items())[1:])):
            assert (await c.client.post(CHAT, json=text_body(stream=True), headers=headers)).status_code == 200
        await c.idle()
    expected = [(10.0, 1.0), (10.0, usual[1]), (usual[0], 1.0)] if client else [usual] * 3
    own = expected != [(40.0, 4.0)] * 3
    assert [(one.ttft_limit_s, one.gap_limit_s) for one in records] == (expected if own else [(0.0, 4.0)] * 3)


async def test_a_key_has_objectives_of_its_own() -> None:
    [first, second] = api_keys("anne-key", "bert-key").keys
    anne = type(first)(first.name, first.hash, limits={"slo_ttft_ms": 7000})
    async with cluster("PD0", config=settings(api_keys=ApiKeys(api_keys().salt, (anne, second)))) as c:
        records = recorded(c)
        for who in ("anne-key", "bert-key"):
            headers = {"authorization": f"Bearer {who}"}
            assert (await c.client.post(CHAT, json=text_body(), headers=headers)).status_code == 200
        await c.idle()
    assert [(one.ttft_limit_s, one.gap_limit_s) for one in records] == [(7.0, 0.05), (0.0, 0.05)]


def attained(c: Cluster, judge: str = "p90") -> tuple[float, float]:
    """How many answers did, and did not."""
    name = "epd_proxy_slo_requests_total"
    yes, no = (c.metric(name, judge=judge, attained=word) for word in ("yes", "no"))
    return yes, no


async def test_an_answer_is_judged_by_its_own_objectives() -> None:
    async with cluster("PD0", config=settings(slo=Slo(ttft_s=30.0, tpot_s=30.0))) as c:
        c["PD0"].usual = after(0.05, answer)
        asked = [({}, True), ({TTFT: "20"}, False), ({TTFT: "30000"}, True)]
        for headers, _ in asked:
            assert (await c.client.post(CHAT, json=text_body(stream=True), headers=headers)).status_code == 200
        await c.idle()
        assert attained(c) == attained(c, "mean") == (2, 1)


async def test_its_tokens_are_judged_by_its_own_objective_too() -> None:
    async with cluster("PD0", config=settings(slo=Slo(ttft_s=30.0, tpot_s=30.0))) as c:

        async def slowly(stage: FakeStage, call: Call, receive: Receive, send: Send) -> None:
            begun = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
            await send(begun)
            for event in (*[chunk("a").replace(b": ", b":")] * 3, DONE):  # as compact as a stage's
                await send({"type": "http.response.body", "body": event, "more_body": True})
                await asyncio.sleep(0.03)
            await send({"type": "http.response.body", "body": b""})

        c["PD0"].usual = slowly
        for headers in ({}, {TPOT: "5"}):
            assert (await c.client.post(CHAT, json=text_body(stream=True), headers=headers)).status_code == 200
        await c.idle()
        assert attained(c) == (1, 1)


WRONG = ["", "0", "-1", "1.5", "soon", "99999999999"]


@pytest.mark.parametrize("name", [TTFT, TPOT])
async def test_a_wrong_value_is_named(name: str) -> None:
    async with cluster("PD0") as c:
        for text in WRONG:
            refused = await c.client.post(CHAT, json=text_body(), headers={name: text})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == name
        twice = await c.client.post(CHAT, json=text_body(), headers=[(name, "5"), (name, "6")])
        assert twice.status_code == 400 and "once" in twice.json()["error"]["message"]
        assert not c["PD0"].calls


@pytest.mark.parametrize("text", ["demo", "demo=1", "=1:2", "demo=1:2:mean", "demo=1:2,3:4", "demo=0:3", "demo=a:b"])
def test_an_objective_of_a_model_that_cannot_be_read_is_named(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        settings(model_slos=(text,))
    assert refused.value.param == "model_slos" and repr(text) in refused.value.message


def test_an_objective_of_a_model_that_is_not_served_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'dem'.*demo") as refused:
        settings(model_slos=("dem=1:2",))
    assert refused.value.param == "model_slos"


def test_objectives_of_models_are_read() -> None:
    config = settings(served_models=("a=b", "c"), model_slos=("a=b=5:6", "c=2000:50.5"))
    assert config.slos_of_models() == {
        "a=b": (0.005, 0.006),
        "c": (2.0, 0.0505),
    }


async def test_what_was_decided_is_said_where_the_client_asks() -> None:
    """A request that waits says before whom, how much slack it has, and whether its account is over its share."""
    async with cluster("EPD0") as c:
        records = recorded(c)
        c.table.pause_for(0.05)
        assert (await c.client.post(CHAT, json=image_body(), headers={TTFT: "9000"})).status_code == 200
        await c.idle()
    [said] = [details for _, event, details in records[0].events if event == "waits"]
    assert said["line"] == "serve" and said["paused"] is True and said["over_share"] is False
    assert said["before_s"] == 0.0 and said["slack_s"] == pytest.approx(9.0, abs=0.2)
