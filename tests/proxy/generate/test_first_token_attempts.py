"""Attempts at streams that begin with P's token: who is asked what, and what a failure costs before and after it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from starlette.types import Receive, Send

from epd_serve.wire import KV_NOT_SENT, TOKEN_SENT
from proxy.config.limits import RetryLimits
from proxy.config.settings import ProxySettings
from proxy.request.parse import Endpoint
from proxy.stages.circuits import CircuitLimits, State
from tests.proxy.fakes import (
    DONE,
    QUICK,
    Behaviour,
    Call,
    Cluster,
    FakeStage,
    breaks,
    chunk,
    cluster,
    hangs,
    once,
    opening,
    refuses,
    replies,
    settings,
    streams,
    text_body,
)

CHAT = Endpoint.CHAT.value
BODY = text_body(stream=True, max_tokens=8, min_tokens=3, logprobs=True, stop=["."], stream_options={})


def last(text: str, reason: str = "length", stop: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": reason, "stop_reason": stop}
    return b"data: " + json.dumps({"object": "chat.completion.chunk", "choices": [choice]}).encode() + b"\n\n"


def sends(text: str = "a", token: int = 7) -> Behaviour:
    """P whose KV is on its way."""
    return streams(opening(0), last(text, stop=f"{TOKEN_SENT}{token}"), DONE)


def goes_on(*texts: str) -> Behaviour:
    return streams(opening(0), *map(chunk, texts), DONE)


@asynccontextmanager
async def alike(*ids: str, config: ProxySettings | None = None) -> AsyncIterator[Cluster]:
    """Stages that were started with the same flags; decoders answer when the prefill instance has."""
    async with cluster(*ids, config=config) as c:
        for name, instance in c.instances.items():
            c.instances[name] = replace(instance, answer_flags=())
            c.table.apply(c.instances[name])
            if name.startswith("P"):
                c[name].usual = sends()
            else:
                c[name].usual = goes_on("a", "b", "c")
        yield c


async def text_of(c: Cluster, body: dict[str, Any] = BODY) -> str:
    response = await c.client.post(CHAT, json=body)
    assert response.status_code == 200 and response.text.endswith("data: [DONE]\n\n"), response.text
    return said(response.text)


def said(stream: str) -> str:
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events if "choices" in event)


def goes_on_after(call: Call) -> list[int]:
    """What it was told that the client has, to be sampled again."""
    params = call.body["kv_transfer_params"]
    assert ("goes_on_after" in params) is ("replay" in params)
    return list(params.get("goes_on_after", ()))


def shown(c: Cluster) -> float:
    return c.metric("epd_proxy_first_tokens_total", stage="P")


def once_shown(c: Cluster, then: Behaviour, number: int = 1) -> Behaviour:
    """D that does as `then` when `number` tokens of P have been shown."""

    async def behave(stage: FakeStage, call: Call, receive: Receive, send: Send) -> None:
        await c.until_metric("epd_proxy_first_tokens_total", number, stage="P")
        await then(stage, call, receive, send)

    return behave


async def test_prefill_is_asked_what_the_client_asks_up_to_one_token_and_decode_to_go_on() -> None:
    async with alike("P0", "D0") as c:
        c["D0"].script.append(once_shown(c, goes_on("a", "b", "c")))
        assert await text_of(c) == "abc" and shown(c) == 1
        (to_p,), (to_d,) = (c[name].calls for name in ("P0", "D0"))
        p, d = to_p.body.pop("kv_transfer_params"), to_d.body.pop("kv_transfer_params")
        assert p["first_token"] is True and d["first_token"] is True and p["transfer_id"] == d["transfer_id"]
        assert to_d.body.pop("return_token_ids") is True  # so that another one can go on
        assert to_p.body == {**to_d.body, "max_tokens": 1, "min_tokens": 1}
        await c.until_metric("epd_proxy_ttft_seconds_count", 1, path="P-D", modality="text")


async def test_decode_that_is_sooner_is_the_whole_answer() -> None:
    async with alike("P0", "D0") as c:
        released = asyncio.Event()
        c["P0"].script.append(once(released, sends()))
        c["D0"].script.append(goes_on("a", "b"))
        task = asyncio.create_task(text_of(c))
        await c.until_metric("epd_proxy_first_tokens_total", 1, stage="D")
        released.set()
        assert await task == "ab" and shown(c) == 0


async def test_the_setting_and_flags_that_differ_leave_it_to_decode() -> None:
    async with alike("P0", "D0", config=settings(first_token="decode")) as c:
        c["P0"].usual = replies(200, {"kv_transfer_params": {"ok": True}})
        assert await text_of(c) == "abc" and c["P0"].calls[0].body["stream"] is False
    async with alike("P0", "D0") as c:
        c.table.apply(replace(c.instances["D0"], answer_flags=("--seed 1",)))
        c["P0"].usual = replies(200, {"kv_transfer_params": {"ok": True}})
        assert await text_of(c) == "abc" and c["P0"].calls[0].body["stream"] is False
        assert "first_token" not in c["D0"].calls[0].body["kv_transfer_params"]


@pytest.mark.parametrize("stream", [True, False])
async def test_one_token_is_asked_of_prefill_alone(stream: bool) -> None:
    async with alike("P0", "D0") as c:
        c["P0"].usual = streams(opening(0), last("a"), DONE) if stream else replies(200, {"choices": []})
        response = await c.client.post(CHAT, json={**BODY, "stream": stream, "max_tokens": 1, "min_tokens": 0})
        assert response.status_code == 200 and not c["D0"].calls
        assert "kv_transfer_params" not in c["P0"].calls[0].body
        await c.idle()


async def test_an_answer_that_stops_at_its_first_token_leaves_decode() -> None:
    async with alike("P0", "D0") as c:
        stream = (opening(0), last("", "stop"), DONE)
        c["P0"].usual, c["D0"].usual = streams(*stream), hangs
        response = await c.client.post(CHAT, json=BODY)
        assert response.content == b"".join(stream)
        await c["D0"].until(lambda stage: stage.cancelled == 1)
        await c.idle()


async def test_prefill_that_breaks_in_an_answer_of_its_own_breaks_the_stream() -> None:
    async with alike("P0", "D0") as c:
        c["P0"].usual, c["D0"].usual = streams(opening(0), last("", "stop"), then="break"), hangs
        received = await c.aborted_stream(BODY)
        assert b'"stop"' in received and received.count(b'"error"') == 1
        await c.idle()


@pytest.mark.parametrize("end", [breaks, refuses(500, "boom"), streams(b'data: {"error": {"code": 500}}\n\n', DONE)])
async def test_decode_that_fails_after_the_token_is_followed_by_one_that_goes_on_after_it(end: Behaviour) -> None:
    async with alike("P0", "D0", "D1") as c:
        turns = [once_shown(c, end), goes_on("a", "b", "c")]

        async def in_turn(*args: Any) -> None:
            await turns.pop(0)(*args)

        c["D0"].usual = c["D1"].usual = in_turn
        c["P0"].script.extend([sends(token=7), replies(200, {"kv_transfer_params": {"ok": True}})])
        assert await text_of(c) == "abc" and shown(c) == 1
        calls = [*c["D0"].calls, *c["D1"].calls]
        assert len(calls) == 2 and {tuple(goes_on_after(call)) for call in calls} == {(), (7,)}
        assert c["P0"].calls[1].body["stream"] is False
        await c.until_metric("epd_proxy_ttft_seconds_count", 1, path="P-D", modality="text")


async def test_prefill_that_breaks_after_its_token_is_followed_by_another() -> None:
    async with alike("P0", "P1", "D0") as c:
        for name in ("P0", "P1"):
            c[name].script.append(streams(opening(0), last("a", stop=f"{TOKEN_SENT}7"), then="break"))
            c[name].usual = replies(200, {"kv_transfer_params": {"ok": True}})
        c["D0"].script.append(hangs)
        assert await text_of(c) == "abc"
        assert [goes_on_after(call) for call in c["D0"].calls] == [[], [7]]


async def test_what_decode_has_said_itself_is_never_said_again() -> None:
    async with alike("P0", "D0") as c:
        c["D0"].script.append(once_shown(c, streams(opening(0), chunk("a"), chunk("b"), then="break")))
        received = await c.aborted_stream(BODY)
        assert said(received.decode()) == "ab" and b'"error"' in received
        assert len(c["D0"].calls) == 1


async def test_what_nobody_can_go_on_with_ends_in_one_error() -> None:
    async with alike("P0", "D0", "D1") as c:
        for name in ("D0", "D1"):
            c[name].script.append(once_shown(c, breaks))

        async def change() -> None:
            await c.until_metric("epd_proxy_first_tokens_total", 1, stage="P")
            for name in ("D0", "D1"):
                c.table.apply(replace(c.instances[name], answer_flags=None))

        changing = asyncio.create_task(change())
        received = await c.aborted_stream(BODY)
        await changing
        assert said(received.decode()) == "a" and received.count(b'"error"') == 1
        await c.idle()


async def test_retries_that_are_used_up_after_the_token_end_in_one_error() -> None:
    config = settings(retry=RetryLimits(ratio=0, floor_per_s=0, burst=1))
    async with alike("P0", "D0", config=config) as c:
        c["P0"].script.append(sends())
        c["P0"].usual = replies(200, {"kv_transfer_params": {"ok": True}})
        c["D0"].script.append(once_shown(c, breaks))
        c["D0"].usual = breaks
        received = await c.aborted_stream(BODY)
        assert said(received.decode()) == "a" and received.count(b'"error"') == 1


async def test_kv_that_prefill_could_not_send_is_its_failure_and_nothing_is_shown() -> None:
    async with alike("P0", "D0") as c:
        c["P0"].script.append(streams(opening(0), last("x", stop=KV_NOT_SENT + "cancelled"), DONE))
        c["D0"].script.append(hangs)
        assert await text_of(c) == "abc"
        assert c.metric("epd_proxy_kv_failures_total", cause="cancelled") == 1
        assert len(c["P0"].calls) == 2


async def test_decode_that_says_something_else_breaks_the_stream() -> None:
    async with alike("P0", "D0") as c:
        c["D0"].script.append(once_shown(c, goes_on("x", "y")))
        c["D0"].usual = goes_on("x", "y")
        c["P0"].script.append(sends())
        c["P0"].usual = replies(200, {"kv_transfer_params": {"ok": True}})
        received = await c.aborted_stream(BODY)
        assert said(received.decode()) == "a" and received.count(b'"error"') == 1


async def test_prefills_token_says_nothing_for_decodes_health() -> None:
    async with alike("P0", "D0", config=settings(retries=0)) as c:
        c.pipeline.circuits._limits = CircuitLimits(open_s=1000.0, open_max_s=1000.0)
        for number in range(1, 6):
            c["D0"].script.append(once_shown(c, breaks, number))
            await c.aborted_stream(BODY)
        assert c.pipeline.circuits.state("D0", c.instances["D0"].incarnation) is State.OPEN
        assert c.pipeline.circuits.state("P0", c.instances["P0"].incarnation) is State.CLOSED


async def test_a_client_that_leaves_between_the_two_leaves_both() -> None:
    async with alike("P0", "D0") as c:
        c["D0"].usual = hangs
        async with c.client.stream("POST", CHAT, json=BODY) as response:
            async for line in response.aiter_lines():
                if '"a"' in line:
                    break
        await c["D0"].until(lambda stage: stage.cancelled == 1)
        await c.idle()


async def test_decode_that_is_late_after_the_token_ends_in_an_error() -> None:
    config = settings(timeouts=replace(QUICK, first_byte_s=0.3), retries=0)
    async with alike("P0", "D0", config=config) as c:
        c["D0"].usual = hangs
        received = await c.aborted_stream(BODY)
        assert said(received.decode()) == "a" and b'"deadline"' in received
