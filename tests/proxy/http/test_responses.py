"""`/v1/responses`: the same ways through the stages as chat, with the words that vLLM's Responses want."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.types import Receive, Send

from tests.proxy.fakes import (
    GRID,
    MODEL,
    Behaviour,
    Call,
    Cluster,
    FakeStage,
    another_proxy,
    cluster,
    data_url,
    encodes,
    image_file,
    refuses,
    replies,
    settings,
    streams,
)

RESPONSES = "/v1/responses"
PNG = data_url(image_file())


def event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


OPENINGS = (event("response.created", response={}), event("response.in_progress", response={}))
DELTA = event("response.output_text.delta", delta="hi")
COMPLETED = event("response.completed", response={"status": "completed"})
ANSWER = {"id": "resp_1", "object": "response", "output": [], "kv_transfer_params": None, "ec_transfer_params": None}


def body(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "hello", "max_output_tokens": 16, **more}


def with_image(url: str = PNG, **more: Any) -> dict[str, Any]:
    parts = [{"type": "input_text", "text": "what is this?"}, {"type": "input_image", "image_url": url, **more}]
    return body(input=[{"role": "user", "content": parts}])


async def ask(c: Cluster, request: dict[str, Any]) -> Any:
    return await c.client.post(RESPONSES, json=request)


def answers(c: Cluster, behaviour: Behaviour = replies(200, ANSWER)) -> None:
    for stage in c.stages.values():
        stage.usual = encodes() if stage.id.startswith("E") and stage.id[1].isdigit() else behaviour


async def test_text_goes_through_prefill_and_decode_under_one_request_id() -> None:
    async with cluster("P0", "D0") as c:
        answers(c)
        response = await ask(c, body(instructions="be kind", store=False))
        to_prefill, to_decode = c["P0"].calls[0].body, c["D0"].calls[0].body
    assert response.status_code == 200 and response.json() == {"id": "resp_1", "object": "response", "output": []}
    assert c["P0"].calls[0].path == c["D0"].calls[0].path == RESPONSES
    assert to_prefill["max_output_tokens"] == 1 and to_decode["max_output_tokens"] == 16
    assert "max_tokens" not in to_prefill
    assert to_prefill["request_id"] == to_decode["request_id"]
    assert to_decode["request_id"] == "resp_" + response.headers["x-request-id"]
    assert to_prefill["kv_transfer_params"]["transfer_id"] == to_decode["kv_transfer_params"]["transfer_id"]
    assert to_prefill["store"] is to_decode["store"] is False
    assert to_decode["instructions"] == to_prefill["instructions"] == "be kind"


async def test_an_image_is_encoded_as_chat_and_travels_by_its_key() -> None:
    async with cluster("E0", "P0", "D0") as c:
        answers(c)
        assert (await ask(c, with_image())).status_code == 200
        (encoded,) = c["E0"].calls
        part = encoded.body["messages"][0]["content"][0]
        sent = [c[name].calls[0].body["input"][0]["content"][1] for name in ("P0", "D0")]
    assert encoded.path == "/v1/chat/completions" and part["type"] == "image_url" and part["image_url"]["url"] == PNG
    placeholder = {"type": "input_image", "detail": "auto", "image_embeds": GRID, "uuid": part["uuid"]}
    assert sent == [placeholder, placeholder]


async def test_where_pixels_travel_they_stay_an_input_image() -> None:
    async with cluster("E0", "PD0", config=settings(send_pixels="always")) as c:
        answers(c)
        assert (await ask(c, with_image(detail="high"))).status_code == 200
        part = c["PD0"].calls[0].body["input"][0]["content"][1]
    assert part["type"] == "input_image" and part["image_url"] == PNG and part["detail"] == "high" and part["uuid"]


async def test_chat_and_responses_have_one_key_for_one_image() -> None:
    async with cluster("E0", "PD0") as c, another_proxy(c) as other:
        answers(c)
        await ask(c, with_image())
        await other.ask(PNG)
        assert c["E0"].keys[0] == c["E0"].keys[1]


async def test_images_that_a_tool_gave_back_are_loaded_too() -> None:
    output = [{"type": "input_image", "image_url": PNG}]
    request = body(input=[{"type": "function_call_output", "call_id": "c", "output": output}])
    async with cluster("EPD0") as c:
        answers(c)
        assert (await ask(c, request)).status_code == 200
        assert c["EPD0"].calls[0].body["input"][0]["output"][0]["uuid"]
        request["input"][0]["output"][0]["image_url"] = "http://127.0.0.1:1/x.png"
        refused = await ask(c, request)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "input[0].output[0].image_url"


async def test_a_stream_is_relayed_event_by_event_to_its_own_end() -> None:
    async with cluster("PD0") as c:
        answers(c, streams(*OPENINGS, DELTA, COMPLETED))
        response = await ask(c, body(stream=True))
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.content == b"".join((*OPENINGS, DELTA, COMPLETED))


async def test_a_stream_whose_end_comes_by_itself_ends_well() -> None:
    arrived, received = asyncio.Event(), b""

    async def behave(stage: FakeStage, call: Call, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        await send({"type": "http.response.body", "body": b"".join((*OPENINGS, DELTA)), "more_body": True})
        await arrived.wait()
        await send({"type": "http.response.body", "body": COMPLETED, "more_body": False})

    async with cluster("PD0") as c:
        answers(c, behave)
        async with c.client.stream("POST", RESPONSES, json=body(stream=True)) as response:
            async for part in response.aiter_bytes():
                received += part
                arrived.set()
    assert received == b"".join((*OPENINGS, DELTA, COMPLETED))


async def test_a_stage_that_dies_after_the_openings_costs_a_retry_only() -> None:
    async with cluster("PD0", "PD1") as c:
        answers(c, streams(*OPENINGS, DELTA, COMPLETED))
        c["PD0"].script.append(streams(*OPENINGS, then="break"))
        c["PD1"].script.append(refuses(500, "boom"))
        response = await ask(c, body(stream=True))
        calls = sum(len(stage.calls) for stage in c.stages.values())
    assert response.content == b"".join((*OPENINGS, DELTA, COMPLETED)) and calls == 3


async def test_a_stream_that_breaks_ends_with_an_error_event_of_the_responses_kind() -> None:
    async with cluster("PD0", config=settings(retries=0)) as c:
        answers(c, streams(*OPENINGS, DELTA, then="break"))
        received = await c.aborted_stream(body(stream=True), RESPONSES)
    last = received.split(b"\n\n")[-2]
    name, _, data = last.partition(b"\n")
    error = json.loads(data[len("data:") :])
    assert name == b"event: error" and error["type"] == "error" and error["code"] == "stage_failed"
    assert error["error"]["message"] == error["message"]


async def test_what_only_one_instance_can_cut_alike_goes_to_one() -> None:
    async with cluster("P0", "D0") as c:
        answers(c)
        assert (await ask(c, body(truncation="auto"))).status_code == 200 and not c["D0"].calls
    async with cluster("P0", "D0", "PD0") as c:
        answers(c)
        assert (await ask(c, body(truncation="auto"))).status_code == 200 and len(c["PD0"].calls) == 1


def part(**fields: Any) -> dict[str, Any]:
    return body(input=[{"role": "user", "content": [fields]}])


REFUSED: list[tuple[dict[str, Any], str]] = [
    (body(previous_response_id="resp_1"), "previous_response_id"),
    (body(conversation="conv_1"), "conversation"),
    (body(background=True), "background"),
    (body(prompt={"id": "p"}), "prompt"),
    (body(request_id="mine"), "request_id"),
    (body(kv_transfer_params={}), "kv_transfer_params"),
    (body(input=[]), "input"),
    (body(input=3), "input"),
    (body(input=["x"]), "input[0]"),
    (body(input=[{"role": "user", "content": {"type": "input_image"}}]), "input[0].content"),
    (body(max_output_tokens=0), "max_output_tokens"),
    (part(type="input_image", image_url="http://127.0.0.1/x.png"), "input[0].content[0].image_url"),
    (part(type="input_image", image_url={"url": PNG}), "input[0].content[0].image_url"),
    (part(type="input_image", image_url=None), "input[0].content[0].image_url"),
    (part(type="input_image", image_url=PNG, uuid="k"), "input[0].content[0].uuid"),
    (part(type="input_image", image_url=PNG, image_embeds={}), "input[0].content[0].image_embeds"),
    (part(type="input_image", image_url=PNG, video_url="http://10.0.0.1/"), "input[0].content[0].image_url"),
    (part(type="input_image", file_id="file-1"), "input[0].content[0].file_id"),
    (part(type="input_file", file_url="http://10.0.0.1/"), "input[0].content[0].type"),
    (part(type="image_url", image_url={"url": PNG}), "input[0].content[0]"),
    (part(type="input_text", text="x", image_url="http://10.0.0.1/"), "input[0].content[0]"),
    (part(type="image_embeds", image_embeds={"image_grid_thw": [1, 1, 1]}), "input[0].content[0].image_embeds"),
]


async def test_what_cannot_be_served_is_refused_by_its_field_and_reaches_no_stage() -> None:
    wrong = []
    async with cluster("E0", "PD0") as c:
        for request, param in REFUSED:
            response = await ask(c, request)
            if response.status_code != 400 or response.json()["error"]["param"] != param:
                wrong.append((param, response.status_code, response.text))
        assert not any(stage.calls for stage in c.stages.values())
    assert not wrong
