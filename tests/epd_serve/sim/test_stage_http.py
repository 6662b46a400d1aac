"""The HTTP of a simulated stage: the subset of vLLM's server that clients and the proxy use."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from epd_serve.roles import Role
from epd_serve.sim.profile import Capacity, Line, Profile
from epd_serve.sim.prompts import CHAT, COMPLETIONS
from tests.epd_serve.sim.served import MODEL, chat, idle, served
from tests.waiting import until


async def events(client: httpx.AsyncClient, path: str, body: dict[str, object]) -> list[Any]:
    """All events of a stream; the last one is "[DONE]"."""
    async with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        raw = await response.aread()
    texts = [event.removeprefix("data: ") for event in raw.decode().split("\n\n")[:-1]]
    return [text if text == "[DONE]" else json.loads(text) for text in texts]


async def test_a_chat_is_answered_in_one_piece() -> None:
    async with served() as (_, client):
        answer = (await client.post(CHAT, json=chat(), headers={"x-request-id": "r1"})).json()
    (choice,) = answer["choices"]
    assert answer["id"] == "chatcmpl-r1" and answer["object"] == "chat.completion"
    assert choice["message"]["content"] and choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 4
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + 4


async def test_a_streamed_chat_says_the_same_token_by_token() -> None:
    async with served() as (_, client):
        whole = (await client.post(CHAT, json=chat())).json()
        first, *tokens, usage, done = await events(client, CHAT, chat(stream_options={"include_usage": True}))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert (
        "".join(one["choices"][0]["delta"]["content"] for one in tokens) == (whole["choices"][0]["message"]["content"])
    )
    assert [one["choices"][0]["finish_reason"] for one in tokens] == [None, None, None, "length"]
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 4 and done == "[DONE]"


async def test_completions_fan_out_over_prompts_and_n() -> None:
    body: dict[str, object] = {"model": MODEL, "prompt": ["one", "two"], "n": 2, "max_tokens": 3}
    async with served() as (_, client):
        whole = (await client.post(COMPLETIONS, json=body)).json()
        *tokens, done = await events(client, COMPLETIONS, body)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3] and done == "[DONE]"
    for choice in whole["choices"]:
        said = [one["choices"][0]["text"] for one in tokens if one["choices"][0]["index"] == choice["index"]]
        assert "".join(said) == choice["text"] and len(said) == 3


async def test_an_answer_that_nobody_bounds_ends_by_itself() -> None:
    async with served(Profile(output_tokens=7)) as (_, client):
        body = {key: value for key, value in chat().items() if key != "max_tokens"}
        answer = (await client.post(CHAT, json=body)).json()
    assert answer["usage"]["completion_tokens"] == 7 and answer["choices"][0]["finish_reason"] == "stop"


async def test_logprobs_token_ids_and_tools_have_vllms_shapes() -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    async with served() as (_, client):
        answer = (await client.post(CHAT, json=chat(logprobs=True, top_logprobs=2, return_token_ids=True))).json()
        called = (await client.post(CHAT, json=chat(tools=tools, tool_choice="required"))).json()
        streamed = await events(client, CHAT, chat(tools=tools, tool_choice="required"))
        text = (await client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 2, "logprobs": 1})).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == 4 and len(content[0]["top_logprobs"]) == 2
    assert len(answer["choices"][0]["token_ids"]) == 4
    assert len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
    (call,) = called["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "look", "arguments": "{}"}
    assert called["choices"][0]["finish_reason"] == streamed[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert streamed[1]["choices"][0]["delta"]["tool_calls"][0]["function"]["name"] == "look"
    assert len(text["choices"][0]["logprobs"]["tokens"]) == 2


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        (CHAT, b"{", 400, ""),
        (CHAT, b"[]", 400, "object"),
        (CHAT, json.dumps(chat(model="other")).encode(), 404, "`other` does not exist"),
        (CHAT, json.dumps(chat(max_tokens=0)).encode(), 400, "max_tokens"),
        (CHAT, json.dumps(chat(max_tokens=10**9)).encode(), 400, "maximum context length"),
        (CHAT, json.dumps(chat(n="x")).encode(), 400, "n has"),
        (CHAT, json.dumps(chat(stop=[1])).encode(), 400, "stop"),
        (COMPLETIONS, b"{}", 400, "prompt"),
        ("/detokenize", b'{"tokens": "x"}', 400, "tokens"),
    ],
)
async def test_a_wrong_body_is_refused_as_vllm_does(path: str, body: bytes, status: int, said: str) -> None:
    async with served() as (_, client):
        response = await client.post(path, content=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, status) and said in error["message"]


async def test_the_rest_of_the_server_answers() -> None:
    async with served() as (_, client):
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == MODEL
        assert "version" in (await client.get("/version")).json()
        tokens = (await client.post("/tokenize", json={"prompt": "hello there"})).json()
        assert tokens["count"] == len(tokens["tokens"]) == 3
        text = (await client.post("/detokenize", json={"tokens": tokens["tokens"]})).json()
        assert text == {"prompt": "hello there"}
        assert "vllm:num_requests_running" in (await client.get("/metrics")).text
        assert (await client.get("/nowhere")).status_code == 404
        assert (await client.get(CHAT)).status_code == 405


async def test_a_guarded_stage_answers_its_proxy_only() -> None:
    async with served(key="k") as (_, client):
        assert (await client.get("/v1/models")).status_code == 401
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/v1/models", headers={"authorization": "Bearer k"})).status_code == 200


async def test_without_an_encoder_it_takes_metadata_and_no_media() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    embeds = {"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 4, 4]}, "uuid": "k"}
    async with served(takes_media=False) as (_, client):
        for part, status in ((image, 400), ({"type": "text", "text": "hi"}, 200)):
            body = chat(messages=[{"role": "user", "content": [part]}])
            assert (await client.post(CHAT, json=body)).status_code == status
        answer = await client.post(CHAT, json=chat(messages=[{"role": "user", "content": [embeds]}], max_tokens=1))
        assert answer.status_code != 400


async def test_a_client_that_leaves_aborts_its_request() -> None:
    async with served(Profile(decode_step_s=((1, 0.001),))) as (engine, client):
        async with client.stream("POST", CHAT, json=chat(max_tokens=30_000, stream=True)) as response:
            async for _ in response.aiter_raw():
                break
        await idle(engine)


async def test_waiting_requests_queue_beyond_the_capacity() -> None:
    profile = Profile(prefill=Line(3600.0), capacity=Capacity(max_running=1))
    async with served(profile) as (engine, client):
        asked = [asyncio.create_task(client.post(CHAT, json=chat())) for _ in range(3)]
        await until(lambda: len(engine.scheduler.waiting) == 2)
        assert len(engine.scheduler.running) == 1
        for task in asked:
            task.cancel()
        await asyncio.wait(asked)
        await idle(engine)


async def test_a_body_of_several_megabytes_arrives() -> None:
    async with served(role=Role.PD) as (_, client):
        answer = await client.post("/tokenize", json={"prompt": "x" * (4 << 20)})
    assert answer.json()["count"] == 1 << 20


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with served() as (_, client):
        address = client.base_url
        reader, writer = await asyncio.open_connection(address.host, address.port)
        get = b"GET %s HTTP/1.1\r\nhost: x\r\n\r\n"
        writer.write(get % b"/version" + get % b"/health" + get % b"/nowhere")
        for status in (b"200", b"200", b"404"):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            assert head.split()[1] == status
        writer.close()


async def test_what_is_no_http_is_refused() -> None:
    async with served() as (_, client):
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(b"hello?\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 400")
        writer.close()
