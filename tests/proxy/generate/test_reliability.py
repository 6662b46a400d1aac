"""Failures before the first byte: elsewhere, within the budget, and away from instances that fail again and again."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace

import pytest

from epd_serve.wire import StageReport
from proxy.config.limits import RetryLimits
from proxy.request.parse import Endpoint
from proxy.stages.circuits import CircuitLimits, State
from tests.proxy.fakes import (
    QUICK,
    Cluster,
    breaks,
    chunk,
    cluster,
    encodes,
    hangs,
    image_body,
    refuses,
    settings,
    streams,
    text_body,
)
from tests.waiting import PATIENCE_S, until

CHAT = Endpoint.CHAT.value


def circuit(c: Cluster, name: str) -> State:
    return c.pipeline.circuits.state(name, c.instances[name].incarnation)


async def test_without_budget_the_first_failure_is_the_answer() -> None:
    async with cluster("PD0", config=settings(retry=RetryLimits(ratio=0, floor_per_s=0, burst=1))) as c:
        c["PD0"].script.extend([breaks] * 3)
        assert (await c.client.post(CHAT, json=text_body())).status_code == 502
        assert len(c["PD0"].calls) == 2, "one retry was there to be had"
        assert (await c.client.post(CHAT, json=text_body())).status_code == 502
        assert len(c["PD0"].calls) == 3
        assert c.metric("epd_proxy_retries_refused_total") == 2
        assert c.metric("epd_proxy_retry_budget") == 0


async def test_without_budget_images_are_left_to_prefill() -> None:
    config = settings(retry=RetryLimits(ratio=0, floor_per_s=0, burst=1))
    async with cluster("E0", "E1", "PD0", config=config) as c:
        for name in ("E0", "E1"):
            c[name].usual = refuses(500, "boom")
        assert (await c.client.post(CHAT, json=image_body())).status_code == 200
        assert (await c.client.post(CHAT, json=image_body())).status_code == 200
        assert len(c["E0"].calls) + len(c["E1"].calls) == 3
        assert c.metric("epd_proxy_encode_fallback_total", reason="no_retries_left") == 1


async def test_an_instance_that_fails_again_and_again_is_left_alone_and_shows_it() -> None:
    async with cluster("PD0", "PD1") as c:
        c.pipeline.circuits._limits = CircuitLimits(open_s=1000.0, open_max_s=1000.0)
        c["PD0"].usual = breaks
        for _ in range(20):
            assert (await c.client.post(CHAT, json=text_body())).status_code == 200
        assert len(c["PD0"].calls) == 5 and circuit(c, "PD0") is State.OPEN
        rows = (await c.client.get("/instances")).json()["instances"]
        assert {row["id"]: row["circuit"] for row in rows} == {"PD0": "open", "PD1": "closed"}
        assert c.metric("epd_proxy_circuit_opened_total", instance="PD0") == 1


async def test_where_nobody_else_is_it_is_asked_all_the_same_and_an_answer_closes_its_circuit() -> None:
    async with cluster("PD0", config=settings(retries=0)) as c:
        c.pipeline.circuits._limits = CircuitLimits(open_s=1000.0, open_max_s=1000.0)
        c["PD0"].script.extend([breaks] * 5)
        for _ in range(5):
            assert (await c.client.post(CHAT, json=text_body())).status_code == 502
        assert circuit(c, "PD0") is State.OPEN
        assert (await c.client.post(CHAT, json=text_body())).status_code == 200
        assert circuit(c, "PD0") is State.CLOSED


async def test_a_half_open_circuit_gets_one_request_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster("PD0", "PD1") as c:
        c.pipeline.circuits._limits = CircuitLimits(open_s=1000.0, open_max_s=1000.0)
        c["PD0"].script.extend([breaks] * 5)
        while circuit(c, "PD0") is not State.OPEN:
            assert (await c.client.post(CHAT, json=text_body())).status_code == 200
        c["PD0"].usual = c["PD1"].usual = hangs
        incarnation = ("PD0", c.instances["PD0"].incarnation)
        monkeypatch.setattr(c.pipeline.circuits._circuits[incarnation], "_open_until", 0.0)
        c.pipeline.circuits._tell(incarnation)
        assert circuit(c, "PD0") is State.HALF_OPEN
        before = len(c["PD0"].calls)
        requests = [asyncio.create_task(c.client.post(CHAT, json=text_body())) for _ in range(6)]
        await c["PD1"].until(lambda stage: stage.active == 5)
        assert len(c["PD0"].calls) == before + 1
        for one in requests:
            one.cancel()
        await c.idle()
        assert circuit(c, "PD0") is State.HALF_OPEN, "a probe that was cancelled says nothing"


async def test_a_refusal_speaks_for_the_instance() -> None:
    async with cluster("PD0") as c:
        c["PD0"].usual = refuses(400, "no")
        for _ in range(8):
            assert (await c.client.post(CHAT, json=text_body())).status_code == 400
        assert circuit(c, "PD0") is State.CLOSED


async def test_an_encoder_has_a_circuit_too() -> None:
    async with cluster("E0", "PD0", config=settings(retries=0)) as c:
        c.pipeline.circuits._limits = CircuitLimits(open_s=1000.0, open_max_s=1000.0)
        c["E0"].usual = breaks
        for _ in range(5):
            assert (await c.client.post(CHAT, json=image_body())).status_code == 200
        assert circuit(c, "E0") is State.OPEN
        c["E0"].usual = encodes()
        assert (await c.client.post(CHAT, json=image_body())).status_code == 200
        assert circuit(c, "E0") is State.CLOSED


async def test_a_first_token_that_is_late_is_sought_elsewhere() -> None:
    async with cluster("PD0", "PD1", config=settings(timeouts=replace(QUICK, first_byte_s=1.0))) as c:
        c["PD0"].usual = hangs
        c["PD1"].usual = streams(chunk("a"), b"data: [DONE]\n\n")
        for _ in range(2):
            response = await c.client.post(CHAT, json=text_body(stream=True))
            assert response.status_code == 200 and b"[DONE]" in response.content
        await c["PD0"].until(lambda stage: stage.active == 0)


async def test_of_a_late_first_token_prefill_is_blamed_while_it_has_not_answered() -> None:
    config = settings(timeouts=replace(QUICK, first_byte_s=1.0))
    async with cluster("P0", "P1", "D0", config=config) as c:
        c["P0"].script.append(hangs)
        c["D0"].script.append(hangs)
        c["D0"].usual = streams(chunk("a"), b"data: [DONE]\n\n")
        assert (await c.client.post(CHAT, json=text_body(stream=True))).status_code == 200
        assert (len(c["P0"].calls), len(c["P1"].calls), len(c["D0"].calls)) == (1, 1, 2)
        assert c.metric("epd_proxy_retries_total", stage="P0") == 1


async def test_an_instance_that_falls_silent_loses_its_requests_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.stages.circuits.CHECK_EVERY_S", 0.02)
    async with cluster("PD0", "PD1", config=settings(timeouts=replace(QUICK, stage_silence_s=0.2))) as c:
        for name in ("PD0", "PD1"):
            c["PD0"].script.append(hangs)
            c.table.report(StageReport(name, c.instances[name].incarnation, 1))
        c["PD0"].usual = hangs
        requests = asyncio.create_task(c.client.post(CHAT, json=text_body()))
        await c["PD0"].until(lambda stage: stage.active == 1)
        seq = 1
        while not requests.done():  # only the other one still reports
            seq += 1
            c.table.report(StageReport("PD1", c.instances["PD1"].incarnation, seq))
            await asyncio.sleep(0.02)
        assert (await requests).status_code == 200
        await c["PD0"].until(lambda stage: stage.cancelled == 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_of_stages_that_report_nothing_the_one_that_is_down_loses_its_requests_to_others(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.stages.circuits.CHECK_EVERY_S", 0.02)
    async with cluster("PD0", "PD1", config=settings(timeouts=replace(QUICK, stage_silence_s=0.2))) as c:
        c["PD0"].usual = hangs
        request = asyncio.create_task(c.client.post(CHAT, json=text_body(stream=stream)))
        await c["PD0"].until(lambda stage: stage.active == 1)
        c.table.mark_down("PD0", "hung: no answer on /health")  # its connections stay open
        async with asyncio.timeout(PATIENCE_S):
            assert (await request).status_code == 200
        await c["PD0"].until(lambda stage: stage.cancelled == 1)


async def test_an_instance_that_is_down_for_a_moment_keeps_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.stages.circuits.CHECK_EVERY_S", 0.02)
    async with cluster("PD0", "PD1", config=settings(timeouts=replace(QUICK, stage_silence_s=0.5))) as c:
        released = asyncio.Event()

        async def slow(*arguments: object) -> None:
            await released.wait()
            await streams(chunk("a"), b"data: [DONE]\n\n")(*arguments)  # type: ignore[arg-type]

        c["PD0"].script.append(slow)
        request = asyncio.create_task(c.client.post(CHAT, json=text_body(stream=True)))
        await c["PD0"].until(lambda stage: stage.active == 1)
        for _ in range(2):
            c.table.mark_down("PD0", "/health answers nothing")
            await until(lambda: c.table.down_s("PD0", c.instances["PD0"].incarnation) > 0.3)
            c.table.mark_up("PD0")
        released.set()
        assert (await request).status_code == 200
        assert (len(c["PD0"].calls), len(c["PD1"].calls)) == (1, 0)


async def test_an_instance_that_is_said_to_be_down_and_still_reports_keeps_its_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("proxy.stages.circuits.CHECK_EVERY_S", 0.02)
    async with cluster("PD0", "PD1", config=settings(timeouts=replace(QUICK, stage_silence_s=0.2))) as c:
        released = asyncio.Event()

        async def slow(*arguments: object) -> None:
            await released.wait()
            await streams(chunk("a"), b"data: [DONE]\n\n")(*arguments)  # type: ignore[arg-type]

        c["PD0"].script.append(slow)
        request = asyncio.create_task(c.client.post(CHAT, json=text_body(stream=True)))
        await c["PD0"].until(lambda stage: stage.active == 1)
        c.table.mark_down("PD0", "node n1 is silent")
        begun, seq = time.monotonic(), 0
        while time.monotonic() < begun + 0.5 and not c["PD0"].cancelled:
            seq += 1
            c.table.report(StageReport("PD0", c.instances["PD0"].incarnation, seq))
            await asyncio.sleep(0.02)
        released.set()
        assert (await request).status_code == 200
        assert (len(c["PD0"].calls), len(c["PD1"].calls)) == (1, 0)
        assert c.table.down_s("PD0", "another") == math.inf


async def test_a_proxy_that_drains_refuses_what_is_new_and_finishes_what_runs() -> None:
    async with cluster("PD0") as c:
        released = asyncio.Event()

        async def slow(*arguments: object) -> None:
            await streams(chunk("a"), then="open")(*arguments)  # type: ignore[arg-type]
            await released.wait()
            await arguments[3]({"type": "http.response.body", "body": b"data: [DONE]\n\n"})  # type: ignore[operator]

        c["PD0"].script.append(slow)
        async with c.client.stream("POST", CHAT, json=text_body(stream=True)) as response:
            parts = response.aiter_bytes()
            received = await anext(parts)
            c.pipeline.drain.begin()
            refused = await c.client.post(CHAT, json=text_body())
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
            assert int(refused.headers["retry-after"]) >= 1 and refused.headers["connection"] == "close"
            health = await c.client.get("/health")
            assert (health.status_code, health.json()) == (503, {"status": "draining", "running": 1})
            assert c.metric("epd_proxy_draining") == 1
            released.set()
            async for part in parts:
                received += part
        assert received.endswith(b"data: [DONE]\n\n")
        async with asyncio.timeout(PATIENCE_S):
            await c.pipeline.drain.idle()
        assert c.metric("epd_proxy_refused_total", reason="draining") == 1
        assert c.pipeline.drain.running == 0
