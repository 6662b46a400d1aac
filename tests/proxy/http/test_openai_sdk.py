"""The `openai` SDK against the proxy, whose stages answer in the shapes that vLLM gives."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
from starlette.types import Receive, Send

from tests.proxy.fakes import (
    DONE,
    MODEL,
    Call,
    Cluster,
    FakeStage,
    api_keys,
    cluster,
    data_url,
    encodes,
    hangs,
    image_file,
    replies,
    settings,
    streams,
)

KEY = "sdk-key"
PNG = image_file(16, 16)
USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
ASK: Any = [{"role": "user", "content": "hello"}]
LOGPROBS = {"content": [{"token": "hi", "logprob": -0.1, "bytes": [104, 105], "top_logprobs": []}]}


def completion(*choices: dict[str, Any]) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": MODEL, "choices": choices,
            "usage": USAGE, "kv_transfer_params": {"ok": True}}  # fmt: skip


def choice(index: int = 0, **message: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": None, **message}
    return {"index": index, "message": message, "logprobs": None, "finish_reason": "stop"}


def chunk(**fields: Any) -> bytes:
    body = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": MODEL,
        "choices": [],
        **fields,
    }
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def delta(finish_reason: str | None = None, **fields: Any) -> bytes:
    return chunk(choices=[{"index": 0, "delta": fields, "logprobs": None, "finish_reason": finish_reason}])


def response(text: str, status: str = "completed") -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    message = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
    return {"id": "resp_1", "object": "response", "created_at": 1, "model": MODEL, "status": status, "tools": [],
            "output": [message], "parallel_tool_calls": True, "tool_choice": "auto"}  # fmt: skip


def event(kind: str, number: int, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, 'sequence_number': number, **fields})}\n\n".encode()


async def vllm(stage: FakeStage, call: Call, receive: Receive, send: Send) -> None:
    """An answer of the kind that the request asks for."""
    body = call.body
    if call.path == "/v1/responses":
        behaviour = replies(200, response("hi"))
        if body.get("stream"):
            text = {"item_id": "msg_1", "output_index": 0, "content_index": 0, "logprobs": []}
            behaviour = streams(
                event("response.created", 0, response=response("", "in_progress")),
                event("response.in_progress", 1, response=response("", "in_progress")),
                event("response.output_text.delta", 2, delta="h", **text),
                event("response.output_text.delta", 3, delta="i", **text),
                event("response.completed", 4, response=response("hi")),
            )
    elif call.path == "/v1/completions":
        texts = [{"index": i, "text": "hi", "logprobs": None, "finish_reason": "stop"} for i in range(2)]
        answer = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": MODEL, "choices": texts}
        behaviour = replies(200, {**answer, "usage": USAGE})
    elif body.get("stream"):
        calls = [{"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]
        message = delta(tool_calls=calls) if body.get("tools") else delta(content="hi")
        usage = chunk(usage=USAGE) if (body.get("stream_options") or {}).get("include_usage") else b""
        behaviour = streams(delta(role="assistant", content=""), message, delta("stop"), usage, DONE)
    elif body.get("tools"):
        call_ = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
        behaviour = replies(200, completion({**choice(tool_calls=[call_]), "finish_reason": "tool_calls"}))
    elif body.get("response_format"):
        behaviour = replies(200, completion(choice(content='{"city": "Bonn"}')))
    elif body.get("logprobs"):
        behaviour = replies(200, completion({**choice(content="hi"), "logprobs": LOGPROBS}))
    else:
        behaviour = replies(200, completion(*[choice(i, content="hi") for i in range(body.get("n") or 1)]))
    await behaviour(stage, call, receive, send)


async def _resolve(host: str, port: int) -> Sequence[str]:
    return ["93.184.216.34"]


@asynccontextmanager
async def sdk() -> AsyncIterator[tuple[openai.AsyncOpenAI, Cluster]]:
    media = httpx.MockTransport(lambda _: httpx.Response(200, stream=httpx.ByteStream(PNG)))
    config = settings(api_keys=api_keys(KEY))
    async with cluster("E0", "P0", "D0", config=config, media_transport=media, resolver=_resolve) as c:
        c["E0"].usual = encodes()
        c["P0"].usual = c["D0"].usual = vllm
        http = httpx.AsyncClient(trust_env=False)
        url = f"{c.client.base_url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0, http_client=http) as client:
            yield client, c


def shows(url: str) -> Any:
    parts = [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": url}}]
    return [{"role": "user", "content": parts}]


async def test_chat_with_choices_and_usage() -> None:
    async with sdk() as (client, _):
        answer = await client.chat.completions.create(model=MODEL, messages=ASK, n=2, max_tokens=4)
    assert [one.message.content for one in answer.choices] == ["hi", "hi"]
    assert answer.usage and answer.usage.total_tokens == 7 and "kv_transfer_params" not in answer.model_dump()
    assert answer._request_id


async def test_a_stream_with_usage_comes_chunk_by_chunk() -> None:
    async with sdk() as (client, _):
        options: Any = {"include_usage": True}
        stream = await client.chat.completions.create(model=MODEL, messages=ASK, stream=True, stream_options=options)
        chunks = [one async for one in stream]
    assert [one.choices[0].delta.content for one in chunks if one.choices] == ["", "hi", None]
    assert chunks[-1].usage and chunks[-1].usage.completion_tokens == 2


async def test_tools_whole_and_streamed() -> None:
    async with sdk() as (client, _):
        answer = await client.chat.completions.create(model=MODEL, messages=ASK, tools=TOOLS)
        streamed = await client.chat.completions.create(model=MODEL, messages=ASK, tools=TOOLS, stream=True)
        names = [call.function.name async for one in streamed for call in one.choices[0].delta.tool_calls or ()
                 if call.function]  # fmt: skip
    [call] = answer.choices[0].message.tool_calls or []
    assert call.type == "function" and json.loads(call.function.arguments) == {"city": "Bonn"} and names == ["weather"]


async def test_logprobs_and_a_json_schema() -> None:
    schema: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": {"type": "object"}}}
    async with sdk() as (client, c):
        scored = await client.chat.completions.create(model=MODEL, messages=ASK, logprobs=True, top_logprobs=1)
        formed = await client.chat.completions.create(model=MODEL, messages=ASK, response_format=schema)
        assert c["D0"].calls[-1].body["response_format"] == schema
    logprobs = scored.choices[0].logprobs
    assert logprobs and logprobs.content and logprobs.content[0].token == "hi"
    assert json.loads(formed.choices[0].message.content or "") == {"city": "Bonn"}


@pytest.mark.parametrize("url", ["https://pics.example.com/cat.png", data_url(PNG)])
async def test_an_image_by_url_and_by_its_bytes(url: str) -> None:
    async with sdk() as (client, c):
        await client.chat.completions.create(model=MODEL, messages=shows(url))
        assert c["E0"].calls[0].body["messages"][0]["content"][0]["image_url"]["url"] == data_url(PNG)


async def test_completions_of_several_prompts() -> None:
    async with sdk() as (client, _):
        answer = await client.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=2)
    assert [one.text for one in answer.choices] == ["hi", "hi"]


async def test_responses_whole_streamed_and_with_an_image() -> None:
    content: Any = [{"type": "input_text", "text": "?"}, {"type": "input_image", "image_url": data_url(PNG)}]
    async with sdk() as (client, c):
        answer = await client.responses.create(model=MODEL, input="hello")
        link_fields = await client.responses.create(model=MODEL, input=[{"role": "user", "content": content}])
        stream = await client.responses.create(model=MODEL, input="hello", stream=True)
        events = [one async for one in stream]
        assert len(c["E0"].calls) == 1
    assert answer.output_text == link_fields.output_text == "hi"
    assert [one.type for one in events][-1] == "response.completed" and len(events) == 5


async def test_an_answer_is_kept_nowhere_and_a_client_that_asks_for_it_is_told() -> None:
    async with sdk() as (client, c):
        ask: Any = {"model": MODEL, "input": "hello"}
        usual: Any = {"metadata": {"a": "b"}, "service_tier": "auto", "prompt_cache_key": "k", "safety_identifier": "s"}
        assert (await client.responses.create(**ask, **usual)).output_text == "hi"
        assert (await client.responses.create(**ask, store=False)).output_text == "hi"
        assert "safety_identifier" not in c["D0"].calls[0].body and c["D0"].calls[0].body["metadata"] == {"a": "b"}
        for more in ({"store": True}, {"background": True}, {"previous_response_id": "resp_1"}, {"conversation": "c"}):
            with pytest.raises(openai.BadRequestError, match="keeps no responses") as caught:
                await client.responses.create(**ask, **more)
            assert caught.value.param == next(iter(more))
        with pytest.raises(openai.BadRequestError, match="store: false"):
            await client.chat.completions.create(model=MODEL, messages=ASK, store=True)
        assert len(c["D0"].calls) == 2


async def test_a_broken_stream_is_an_exception_to_the_sdk() -> None:
    async with sdk() as (client, c):
        c["P0"].usual = c["D0"].usual = streams(delta(content="hi"), then="break")
        stream = await client.chat.completions.create(model=MODEL, messages=ASK, stream=True)
        with pytest.raises(openai.APIError):
            [one async for one in stream]
        opening = event("response.created", 0, response=response("", "in_progress"))
        item = event("response.output_text.delta", 1, delta="h", item_id="m", output_index=0, content_index=0)
        c["P0"].usual, c["D0"].usual = vllm, streams(opening, item, then="break")
        events = await client.responses.create(model=MODEL, input="hello", stream=True)
        with pytest.raises(openai.APIError):
            [one async for one in events]


async def test_errors_are_the_sdk_s_own() -> None:
    async with sdk() as (client, _):
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="gpt-9", messages=ASK)
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model=MODEL, messages=ASK, n=1000)
        assert refused.value.param == "n"
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="wrong").models.list()
        with pytest.raises(openai.BadRequestError, match="keeps no responses"):
            await client.responses.create(model=MODEL, input="x", previous_response_id="resp_0")


async def test_a_key_over_its_limit_is_told_how_long_to_wait() -> None:
    async with sdk() as (client, c):
        c.pipeline.callers.go_by(api_keys(KEY, requests_per_minute=1))
        await client.chat.completions.create(model=MODEL, messages=ASK)
        with pytest.raises(openai.RateLimitError) as refused:
            await client.chat.completions.create(model=MODEL, messages=ASK)
        assert int(refused.value.response.headers["retry-after"]) > 30


async def test_models_are_listed_and_found() -> None:
    async with sdk() as (client, _):
        assert [one.id async for one in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL


async def test_the_way_of_a_request_is_in_the_raw_answer() -> None:
    async with sdk() as (client, _):
        raw = await client.chat.completions.with_raw_response.create(
            model=MODEL, messages=ASK, extra_headers={"x-epd-explain": "1"}
        )
    assert raw.headers["x-epd-path"] == "P-D" and raw.parse().choices[0].message.content == "hi"


async def test_a_client_that_leaves_a_stream_cancels_it() -> None:
    async with sdk() as (client, c):
        c["D0"].usual = streams(delta(content="hi"), then="hang")
        c["P0"].usual = hangs
        async with await client.chat.completions.create(model=MODEL, messages=ASK, stream=True) as stream:
            async for _ in stream:
                break
        await c.idle()
        assert c["D0"].cancelled == 1


async def test_the_synchronous_client_is_served_alike() -> None:
    async with sdk() as (client, _):

        def synchronous() -> list[str | None]:
            http = httpx.Client(trust_env=False)
            with openai.OpenAI(base_url=client.base_url, api_key=KEY, max_retries=0, http_client=http) as sync:
                whole = sync.chat.completions.create(model=MODEL, messages=ASK)
                stream = sync.chat.completions.create(model=MODEL, messages=ASK, stream=True)
                return [whole.choices[0].message.content, *[one.choices[0].delta.content for one in stream]]

        assert await asyncio.to_thread(synchronous) == ["hi", "", "hi", None]
