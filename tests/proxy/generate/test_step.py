"""Prefill and decode: order, bodies, retries, the commit point."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import httpx
import pytest
from starlette.types import Receive, Send

from epd_serve.wire import PROMPT_XARG
from proxy.request.parse import Endpoint
from tests.proxy.fakes import (
    DONE,
    QUICK,
    Call,
    FakeStage,
    answer,
    breaks,
    chunk,
    cluster,
    hangs,
    image_body,
    opening,
    refused_instance,
    refuses,
    replies,
    settings,
    streams,
    text_body,
)

CHAT = Endpoint.CHAT.value


async def test_text_goes_to_decode_and_prefill_under_one_transfer_id() -> None:
    async with cluster("E0", "P0", "D0") as c:
        response = await c.client.post(CHAT, json=text_body(n=2, stop=["x"], logprobs=True, unknown_field={"a": 1}))
        assert response.status_code == 200
        await c.idle()
        assert not c["E0"].calls
        [prefill], [decode] = c["P0"].calls, c["D0"].calls
    kv = prefill.body["kv_transfer_params"]
    assert kv["incarnation"] == "P0-life1"
    assert decode.body["kv_transfer_params"] == {
        "transfer_id": kv["transfer_id"],
        "peer": {"instance": "P0", "incarnation": "P0-life1", "endpoint": "ipc:///P0.kv"},
    }
    assert prefill.body["max_tokens"] == 1 and prefill.body["stream"] is False and prefill.body["n"] == 2
    assert "stop" not in prefill.body and "logprobs" not in prefill.body
    assert "unknown_field" not in prefill.body.keys() | decode.body.keys()
    assert decode.body["stop"] == ["x"] and decode.body["max_tokens"] == 4
    assert prefill.headers["x-request-id"] == decode.headers["x-request-id"] == response.headers["x-request-id"]


async def test_internals_are_stripped_from_the_answer() -> None:
    async with cluster("P0", "D0") as c:
        answered = (await c.client.post(CHAT, json=text_body(n=3))).json()
        assert set(answered) == {"object", "choices"}
        assert len(answered["choices"]) == 3
        await c.client.post(CHAT, json=text_body())
        assert "return_token_ids" not in c["D0"].calls[-1].body, "an answer in one piece does not go on elsewhere"
        answer_with_ids = (await c.client.post(CHAT, json=text_body(return_token_ids=True))).json()
        assert answer_with_ids["prompt_token_ids"] == [1, 2]


@pytest.mark.parametrize(
    "layout", [("PD0",), ("EPD0",), ("E0", "PD0"), ("D0", "P0"), ("E0", "D0", "P0"), ("D0", "EP0")]
)
async def test_what_needs_one_instance_is_asked_of_one_as_the_client_asks(layout: tuple[str, ...]) -> None:
    async with cluster(*layout) as c:
        response = await c.client.post(CHAT, json=text_body(prompt_logprobs=1))
        assert response.status_code == 200
        body = c[layout[-1]].calls[0].body
        assert set(body.pop("vllm_xargs")) == {PROMPT_XARG} and body == text_body(prompt_logprobs=1)
        assert not any(c[other].calls for other in layout[:-1])


async def test_completions_go_to_the_completions_endpoint() -> None:
    async with cluster("P0", "D0") as c:
        body = {"model": "demo", "prompt": ["a", "b"], "max_tokens": 3}
        assert (await c.client.post("/v1/completions", json=body)).status_code == 200
        assert c["D0"].calls[0].path == "/v1/completions"
        assert c["P0"].calls[0].body["prompt"] == ["a", "b"]


async def test_a_stream_is_relayed_byte_for_byte() -> None:
    events = (chunk("a"), chunk("ü", odd="  spaces "), b'data: {"choices": [], "usage": {"total_tokens": 3}}\n\n', DONE)
    async with cluster("P0", "D0") as c:
        c["D0"].script.append(streams(*events))
        response = await c.client.post(CHAT, json=text_body(stream=True))
        assert response.content == b"".join(events)
        assert response.headers["content-type"].startswith("text/event-stream")
        await c.idle()
        assert c.metric("epd_proxy_ttft_seconds_count", path="P-D", modality="text") == 1
        assert c.metric("epd_proxy_requests_total", endpoint=CHAT, status="200") == 1


async def test_first_event_reaches_the_client_while_the_stage_still_works() -> None:
    async with cluster("PD0") as c:
        c["PD0"].script.append(streams(chunk("a"), then="hang"))
        async with c.client.stream("POST", CHAT, json=text_body(stream=True)) as response:
            assert await anext(response.aiter_bytes()) == chunk("a")


async def test_a_failure_after_the_first_byte_ends_in_one_error_event_and_an_aborted_connection() -> None:
    async with cluster("P0", "D0") as c:
        c["D0"].script.append(streams(chunk("a"), then="break"))
        received = await c.aborted_stream(text_body(stream=True))
        first, error, rest = received.split(b"\n\n")
        assert first + b"\n\n" == chunk("a")
        assert json.loads(error[6:])["error"]["code"] == "stage_failed"
        assert rest == b""
        assert len(c["D0"].calls) == 1, "no retry after the first byte"
        await c.idle()
        assert c.metric("epd_proxy_requests_total", endpoint=CHAT, status="broken") == 1


async def test_an_error_event_from_the_stage_never_ends_in_done() -> None:
    error = b'data: {"error": {"message": "engine", "type": "x", "param": null, "code": 500}}\n\n'
    async with cluster("PD0") as c:
        begun = asyncio.Event()

        async def fails_once_begun(_: FakeStage, __: Call, ___: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": chunk("a"), "more_body": True})
            await begun.wait()  # in a read of its own, or nothing would be committed
            await send({"type": "http.response.body", "body": error + DONE})

        c["PD0"].script.append(fails_once_begun)
        received = await c.aborted_stream(text_body(stream=True), begun=begun)
        assert received.startswith(chunk("a")) and b"[DONE]" not in received and received.count(b'"error"') == 1


async def test_an_error_event_in_one_read_with_the_first_token_is_retried() -> None:
    error = b'data: {"error": {"message": "engine", "type": "x", "param": null, "code": 500}}\n\n'
    async with cluster("P0", "D0") as c:
        c["D0"].script.append(streams(opening(0) + chunk("a") + error + DONE))
        response = await c.client.post(CHAT, json=text_body(stream=True))
        assert response.content.endswith(DONE) and b"error" not in response.content
        assert len(c["D0"].calls) == 2


async def test_an_error_event_before_the_first_token_is_retried() -> None:
    error = b'data: {"error": {"message": "kv load", "type": "x", "param": null, "code": 500}}\n\n'
    async with cluster("P0", "D0") as c:
        c["D0"].script.append(streams(error, DONE))
        response = await c.client.post(CHAT, json=text_body(stream=True))
        assert response.content.endswith(DONE) and b"error" not in response.content
        assert len(c["D0"].calls) == 2


@pytest.mark.parametrize("n", [1, 2])
async def test_vllm_s_opening_event_promises_nothing_so_an_error_right_after_it_is_retried(n: int) -> None:
    """vLLM sends the role before it looks at the engine's first result, which may be an error (`mm cache miss`)."""
    error = b'data: {"error": {"message": "Internal server error", "type": "x", "param": null, "code": 500}}\n\n'
    openings = [opening(index) for index in range(n)]
    async with cluster("P0", "D0") as c:
        c["D0"].script.append(streams(*openings, error, DONE))
        c["D0"].script.append(streams(*openings, chunk("a"), DONE))
        response = await c.client.post(CHAT, json=text_body(stream=True, n=n))
        assert response.content == b"".join((*openings, chunk("a"), DONE))
        assert len(c["D0"].calls) == 2


async def test_an_answer_without_any_text_keeps_its_opening_event() -> None:
    end = b'data: {"choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": "stop"}]}\n\n'
    async with cluster("PD0") as c:
        c["PD0"].script.append(streams(opening(0), end, DONE))
        response = await c.client.post(CHAT, json=text_body(stream=True))
        assert response.content == opening(0) + end + DONE


@pytest.mark.parametrize("stream", [False, True])
async def test_decode_dying_before_the_first_byte_is_retried_elsewhere_under_a_new_transfer_id(stream: bool) -> None:
    async with cluster("P0", "D0", "D1") as c:
        c["D0"].script.append(breaks)
        c["P0"].script.append(hangs)
        response = await c.client.post(CHAT, json=text_body(stream=stream))
        assert response.status_code == 200
        await c.idle()
        first, second = (call.body["kv_transfer_params"]["transfer_id"] for call in c["P0"].calls)
        assert first != second
        assert c["P0"].cancelled == 1, "the first prefill was cancelled"
        assert len(c["D0"].calls) == len(c["D1"].calls) == 1
        assert c.metric("epd_proxy_retries_total", stage="D0") == 1


async def test_retries_are_bounded() -> None:
    async with cluster("PD0") as c:
        c["PD0"].script.extend([breaks] * 10)
        response = await c.client.post(CHAT, json=text_body())
        assert response.status_code == 502
        assert response.json()["error"]["code"] == "stage_failed"
        assert len(c["PD0"].calls) == 3


async def test_prefill_refusal_cancels_decode_and_is_the_answer() -> None:
    async with cluster("P0", "D0") as c:
        c["P0"].script.append(refuses(400, "context overflow", "messages"))
        c["D0"].script.append(hangs)
        response = await c.client.post(CHAT, json=text_body())
        assert response.status_code == 400
        assert response.json()["error"] == {
            "message": "context overflow", "type": "invalid_request_error", "param": "messages", "code": None,
        }  # fmt: skip
        await c["D0"].until(lambda stage: stage.cancelled == 1)
        await c.idle()


@pytest.mark.parametrize(
    "failure", [refuses(500, "boom"), breaks, replies(200, {"kv_transfer_params": {"ok": False, "reason": "x"}})]
)
async def test_prefill_failure_cancels_decode_and_starts_over(failure: object) -> None:
    async with cluster("P0", "D0") as c:
        c["P0"].script.append(failure)  # type: ignore[arg-type]
        c["D0"].script.append(hangs)
        assert (await c.client.post(CHAT, json=text_body())).status_code == 200
        await c.idle()
        assert c["D0"].cancelled == 1 and len(c["D0"].calls) == len(c["P0"].calls) == 2


async def test_prefill_failing_after_the_first_byte_does_not_hurt_the_stream() -> None:
    async with cluster("P0", "D0") as c:
        released = asyncio.Event()

        async def late_failure(*arguments: object) -> None:
            await released.wait()
            await breaks(*arguments)  # type: ignore[arg-type]

        c["P0"].script.append(late_failure)
        async with c.client.stream("POST", CHAT, json=text_body(stream=True)) as response:
            parts = response.aiter_bytes()
            received = await anext(parts)
            released.set()
            async for part in parts:
                received += part
        assert received.endswith(DONE)


async def test_an_unreachable_instance_is_avoided() -> None:
    async with cluster("PD1") as c:
        c.table.apply(refused_instance("PD0", c["PD1"].role))
        for _ in range(4):
            assert (await c.client.post(CHAT, json=text_body())).status_code == 200
        assert len(c["PD1"].calls) == 4


async def test_a_missing_role_is_503_after_the_wait() -> None:
    async with cluster("P0", "D0") as c:
        c.table.mark_down("D0", "killed")
        response = await c.client.post(CHAT, json=text_body())
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "no_instance" and "D" in response.json()["error"]["message"]
        assert int(response.headers["retry-after"]) >= 1
        assert not c["P0"].calls


async def test_a_request_waits_for_a_restarted_stage() -> None:
    patient = settings(timeouts=replace(QUICK, instance_wait_s=8))
    async with cluster("P0", "D0", config=patient) as c:
        first = c.instances["D0"]
        c["D0"].script.append(breaks)
        c["P0"].script.append(hangs)
        request = asyncio.create_task(c.client.post(CHAT, json=text_body()))
        await c["D0"].until(lambda stage: bool(stage.calls))
        c.table.mark_down("D0", "killed", incarnation=first.incarnation)
        await c["P0"].until(lambda stage: stage.cancelled == 1)
        c.table.apply(replace(first, incarnation="D0-life2"))
        assert (await request).status_code == 200
        await c.idle()


async def test_a_probed_dead_instance_is_replaced_by_its_next_incarnation() -> None:
    patient = settings(timeouts=replace(QUICK, instance_wait_s=8))
    async with cluster("PD0", config=patient) as c:
        alive = c.instances["PD0"]
        c.table.apply(refused_instance("PD0", alive.role))
        request = asyncio.create_task(c.client.post(CHAT, json=text_body()))
        while not c.metric("epd_proxy_retries_total", stage="PD0"):
            await asyncio.sleep(0.005)
        c.table.apply(alive)
        assert (await request).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_every_stage(stream: bool) -> None:
    async with cluster("P0", "D0") as c:
        c["P0"].script.append(hangs)
        c["D0"].script.append(hangs)
        request = asyncio.create_task(c.client.post(CHAT, json=text_body(stream=stream)))
        await c["P0"].until(lambda stage: stage.active == 1)
        await c["D0"].until(lambda stage: stage.active == 1)
        request.cancel()
        await c["P0"].until(lambda stage: stage.cancelled == 1)
        await c["D0"].until(lambda stage: stage.cancelled == 1)
        await c.idle()
        assert c.metric("epd_proxy_requests_total", endpoint=CHAT, status="cancelled") == 1


async def test_a_client_that_leaves_mid_stream_cancels_decode() -> None:
    async with cluster("PD0") as c:
        c["PD0"].script.append(streams(chunk("a"), then="hang"))
        async with c.client.stream("POST", CHAT, json=text_body(stream=True)) as response:
            await anext(response.aiter_bytes())
        await c["PD0"].until(lambda stage: stage.cancelled == 1)
        await c.idle()


async def test_a_late_first_token_is_a_504_that_says_so() -> None:
    async with cluster("PD0", config=settings(timeouts=replace(QUICK, first_byte_s=0.3))) as c:
        c["PD0"].script.append(hangs)
        late = await c.client.post(CHAT, json=text_body(stream=True))
        assert late.status_code == 504 and "first token" in late.json()["error"]["message"]
        await c.idle()


async def test_a_late_next_token_ends_the_stream_and_says_so() -> None:
    async with cluster("PD0", config=settings(timeouts=replace(QUICK, idle_s=0.1))) as c:
        c["PD0"].script.append(streams(chunk("a"), then="hang"))
        received = await c.aborted_stream(text_body(stream=True))
        assert received.startswith(chunk("a")) and b"next token" in received
        await c["PD0"].until(lambda stage: stage.cancelled == 1)


async def test_the_whole_request_has_a_deadline() -> None:
    async with cluster("PD0", config=settings(timeouts=replace(QUICK, total_s=0.5))) as c:
        c["PD0"].script.append(hangs)
        assert (await c.client.post(CHAT, json=text_body())).status_code == 504
        await c.idle()  # the stage has been left, if half a second was enough to reach it


async def test_load_is_spread_over_instances() -> None:
    async with cluster("P0", "P1", "D0", "D1", "D2") as c:
        await asyncio.gather(*(c.client.post(CHAT, json=text_body()) for _ in range(12)))
        assert [len(c[name].calls) for name in ("P0", "P1", "D0", "D1", "D2")] == [6, 6, 4, 4, 4]


async def test_nothing_stays_in_flight_whatever_happened() -> None:
    async with cluster("E0", "P0", "P1", "D0", "D1") as c:
        c["E0"].script.extend([answer, refuses(500, "x"), breaks, refuses(400, "bad"), answer])
        c["P0"].script.extend([breaks, refuses(500, "x"), refuses(400, "bad"), answer])
        c["P1"].script.extend([hangs, answer, replies(200, {"kv_transfer_params": {"ok": False, "reason": "x"}})])
        c["D0"].script.extend([breaks, streams(chunk("a"), then="break"), streams(chunk("a"), then="hang")])
        c["D1"].script.extend([hangs, refuses(503, "dead"), refuses(422, "bad")])

        async def one(index: int) -> None:
            body = (image_body if index % 2 else text_body)(stream=bool(index % 3))
            try:
                await asyncio.wait_for(c.client.post(CHAT, json=body), timeout=0.8)
            except (TimeoutError, httpx.HTTPError):
                return

        await asyncio.gather(*(one(index) for index in range(24)))
        await c.idle()
        assert all(view.load == pytest.approx(0) for view in c.table.snapshot())
