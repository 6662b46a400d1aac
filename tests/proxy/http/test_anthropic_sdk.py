"""The `anthropic` SDK against the proxy, whose stages answer chats in the shapes that vLLM gives."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx
import httpx2
import pytest
from starlette.types import Receive, Send

from proxy.records.record import Record
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
    image_file,
    replies,
    settings,
    streams,
)
from tests.proxy.http.test_openai_sdk import chunk, completion, delta

KEY = "sdk-key"
PNG, OTHER_PNG = image_file(16, 16), image_file(24, 16)
USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 3}}
ASK: Any = [{"role": "user", "content": "hello"}]
TOOL: Any = {"name": "weather", "description": "of a city", "input_schema": {"type": "object", "properties": {}}}
LAYOUTS = [("PD0",), ("P0", "D0"), ("E0", "P0", "D0"), ("E0", "PD0")]


def source(data: bytes) -> Any:
    return {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}


def image(data: bytes) -> Any:
    return {"type": "image", "source": source(data)}


def called(arguments: str | None, name: str | None = "weather") -> dict[str, Any]:
    return {
        "index": 0,
        "id": "call_1" if name else None,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


async def vllm(stage: FakeStage, call: Call, receive: Receive, send: Send) -> None:
    """An answer of the kind that the request asks for."""
    body = call.body
    thinks = body.get("thinking_token_budget") is not None
    if call.path == "/tokenize":
        behaviour = replies(200, {"count": 9, "max_model_len": 99, "tokens": [1] * 9})
    elif body.get("stream"):
        assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
        counted = {"usage": USAGE}
        first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        opening = chunk(choices=[first], usage={**USAGE, "completion_tokens": 0})
        thoughts = [delta(reasoning="hm"), delta(reasoning="m")] if thinks else []
        said = [delta(content="h"), delta(content="i")]
        if body.get("tools"):
            said += [delta(tool_calls=[called('{"city": ')]), delta(tool_calls=[called('"Bonn"}', None)])]
        end = delta("tool_calls" if body.get("tools") else "stop")
        behaviour = streams(opening, *thoughts, *said, end, chunk(**counted), DONE)
    else:
        message: dict[str, Any] = {"role": "assistant", "content": "hi", "reasoning": "hmm" if thinks else None}
        if body.get("tools"):
            message["tool_calls"] = [called('{"city": "Bonn"}')]
        reason = "length" if body["max_tokens"] == 2 else "tool_calls" if body.get("tools") else "stop"
        stop = {"finish_reason": reason, "stop_reason": (body.get("stop") or [None])[0]}
        behaviour = replies(200, {**completion({"index": 0, "message": message, **stop}), "usage": USAGE})
    await behaviour(stage, call, receive, send)


async def _resolve(host: str, port: int) -> Sequence[str]:
    return ["93.184.216.34"]


@asynccontextmanager
async def sdk(*names: str) -> AsyncIterator[tuple[anthropic.AsyncAnthropic, Cluster]]:
    media = httpx.MockTransport(lambda _: httpx.Response(200, stream=httpx.ByteStream(PNG)))
    config = settings(api_keys=api_keys(KEY))
    names = names or ("P0", "D0")
    async with cluster(*names, config=config, media_transport=media, resolver=_resolve) as c:
        for name in names:
            c[name].usual = encodes() if name.startswith("E") else vllm
        http = httpx2.AsyncClient(trust_env=False)
        url = str(c.client.base_url)
        async with anthropic.AsyncAnthropic(base_url=url, api_key=KEY, max_retries=0, http_client=http) as client:
            yield client, c


async def ask(client: anthropic.AsyncAnthropic, messages: Any = ASK, **more: Any) -> anthropic.types.Message:
    return await client.messages.create(**{"model": MODEL, "max_tokens": 8, **more}, messages=messages)


@pytest.mark.parametrize("names", LAYOUTS)
async def test_a_message_whole_and_streamed(names: tuple[str, ...]) -> None:
    async with sdk(*names) as (client, c):
        answer = await ask(client, system="be brief")
        async with client.messages.stream(model=MODEL, max_tokens=8, messages=ASK, system="be brief") as stream:
            kinds = [event.type async for event in stream]
            streamed = await stream.get_final_message()
        assert c[names[-1]].calls[0].body["messages"][0] == {"role": "system", "content": "be brief"}
    for one in (answer, streamed):
        [block] = one.content
        assert block.type == "text" and block.text == "hi"
        assert (one.stop_reason, one.stop_sequence, one.role, one.model) == ("end_turn", None, "assistant", MODEL)
        assert (one.usage.input_tokens, one.usage.cache_read_input_tokens, one.usage.output_tokens) == (2, 3, 2)
        assert answer._request_id and one.id.startswith("msg_") and "kv_transfer_params" not in one.model_dump()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"


@pytest.mark.parametrize("names", LAYOUTS)
@pytest.mark.parametrize("stream", [False, True])
async def test_images_of_a_user_and_of_a_tool_go_to_encoders_and_stages(names: tuple[str, ...], stream: bool) -> None:
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "seen"}, image(PNG)]}
    turns = [
        {"role": "user", "content": [image(OTHER_PNG), {"type": "text", "text": "what?"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "look", "input": {"at": 1}}]},
        {"role": "user", "content": [result, {"type": "text", "text": "and now?"}]},
    ]
    async with sdk(*names) as (client, c):
        answer = await ask(client, turns, stream=stream)
        if stream:
            assert [event.type async for event in answer][-1] == "message_stop"  # type: ignore[attr-defined]
        encoders = [name for name in names if name.startswith("E")]
        shown = [
            part["image_url"]["url"]
            for name in encoders
            for call in c[name].calls
            for part in call.body["messages"][0]["content"]
        ]
        if encoders:
            assert sorted(shown) == sorted([data_url(PNG), data_url(OTHER_PNG)])
        asked = c[names[-1]].calls[0].body["messages"]
    assert [one["role"] for one in asked] == ["user", "assistant", "tool", "user", "user"]
    first, call, tool, of_tool, last = asked
    assert [part["type"] for part in first["content"]] == ["image_embeds" if encoders else "image_url", "text"]
    assert json.loads(call["tool_calls"][0]["function"]["arguments"]) == {"at": 1}
    assert (tool["tool_call_id"], tool["content"], last["content"]) == ("t1", "seen", "and now?")
    uuids = [first["content"][0]["uuid"], of_tool["content"][0]["uuid"]]
    assert len(set(uuids)) == 2 and all(uuids)


async def test_an_image_by_url() -> None:
    shown = {"type": "image", "source": {"type": "url", "url": "https://pics.example.com/cat.png"}}
    async with sdk("E0", "PD0") as (client, c):
        await ask(client, [{"role": "user", "content": [shown]}])
        assert c["E0"].calls[0].body["messages"][0]["content"][0]["image_url"]["url"] == data_url(PNG)


async def test_tools_and_thoughts_whole_and_streamed() -> None:
    more: Any = {"tools": [TOOL], "thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000}
    async with sdk() as (client, c):
        whole = await ask(client, **more, tool_choice={"type": "any", "disable_parallel_tool_use": True})
        async with client.messages.stream(model=MODEL, messages=ASK, **more) as stream:
            streamed = await stream.get_final_message()
        asked = c["D0"].calls[0].body
        assert (asked["tool_choice"], asked["parallel_tool_calls"]) == ("required", False)
        assert asked["thinking_token_budget"] == 1024 and "thinking_token_budget" not in c["P0"].calls[0].body
        assert asked["tools"] == [
            {
                "type": "function",
                "function": {
                    "name": "weather",
                    "description": "of a city",
                    "parameters": {"type": "object", "properties": {}},
                },
            }
        ]
    for one in (whole, streamed):
        thought, text, call = one.content
        assert thought.type == "thinking" and thought.thinking == "hmm" and thought.signature
        assert text.type == "text" and text.text == "hi"
        assert call.type == "tool_use" and (call.id, call.name, call.input) == ("call_1", "weather", {"city": "Bonn"})
        assert one.stop_reason == "tool_use"


async def test_what_a_model_thought_and_called_goes_back_to_it() -> None:
    thought = {"type": "thinking", "thinking": "hmm", "signature": "s"}
    said = [thought, {"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "hi"}]
    async with sdk("PD0") as (client, c):
        await ask(client, [*ASK, {"role": "assistant", "content": said}, *ASK])
        assert c["PD0"].calls[0].body["messages"][1] == {"role": "assistant", "reasoning": "hmm", "content": "hi"}


async def test_how_an_answer_ended() -> None:
    async with sdk("PD0") as (client, _):
        assert (await ask(client, max_tokens=2)).stop_reason == "max_tokens"
        stopped = await ask(client, stop_sequences=["x"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "x")


async def test_tokens_are_counted_by_a_tokenizer() -> None:
    async with sdk("E0", "PD0") as (client, c):
        turns: Any = [{"role": "user", "content": [image(PNG), {"type": "text", "text": "what?"}]}]
        counted = await client.messages.count_tokens(model=MODEL, messages=turns, system="be brief", tools=[TOOL])
        [call] = c["PD0"].calls
    assert counted.input_tokens == 9 and call.path == "/tokenize"
    assert call.body["messages"][1]["content"][0]["image_url"]["url"] == data_url(PNG)
    assert call.body["tools"][0]["function"]["name"] == "weather"


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].source"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image", "source": {"type": "file", "file_id": "f"}}]}
                ]
            },
            "messages[0].content[0].source.type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {**source(PNG), "data": "@"}}]}]},
            "messages[0].content[0].source",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image", "source": {**source(PNG), "media_type": "text/html"}}],
                    }
                ]
            },
            "messages[0].content[0].source.media_type",
        ),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking.budget_tokens"),
        ({"vllm_xargs": {"epd_prompt": "x"}}, "vllm_xargs.epd_prompt"),
        ({"kv_transfer_params": {}}, "kv_transfer_params"),
        ({"cache_salt": "x"}, "cache_salt"),
    ],
)
async def test_bad_input_is_a_400_that_names_the_field(more: dict[str, Any], field: str) -> None:
    async with sdk("E0", "P0", "D0") as (client, c):
        with pytest.raises(anthropic.BadRequestError) as caught:
            await ask(client, extra_body=more)
        assert caught.value.body == {
            "type": "error",
            "error": {"type": "invalid_request_error", "message": caught.value.body["error"]["message"]},  # type: ignore[index]
        }
        assert field in caught.value.message
        assert not any(stage.calls for stage in c.stages.values())


async def test_errors_are_the_sdk_s_own() -> None:
    async with sdk() as (client, c):
        with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
            await ask(client, model="claude-9")
        with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
            await client.with_options(api_key="wrong").messages.create(model=MODEL, max_tokens=1, messages=ASK)
        c.pipeline.callers.go_by(api_keys(KEY, requests_per_minute=1))
        await ask(client)
        with pytest.raises(anthropic.RateLimitError, match="rate_limit_error") as refused:
            await ask(client)
        assert int(refused.value.response.headers["retry-after"]) > 30
    async with sdk("P0", "D0") as (client, c):
        c["D0"].usual = replies(400, {"error": {"message": "too long", "type": "BadRequestError", "code": 400}})
        with pytest.raises(anthropic.BadRequestError, match="too long"):
            await ask(client)


async def test_a_bearer_key_is_taken_as_well() -> None:
    async with sdk() as (client, c):
        by_bearer = anthropic.AsyncAnthropic(
            base_url=client.base_url, api_key=None, auth_token=KEY, http_client=httpx2.AsyncClient(trust_env=False)
        )
        async with by_bearer:
            assert (await ask(by_bearer)).stop_reason == "end_turn"
        unnamed = await c.client.post("/v1/messages", json={}, headers={"x-api-key": ""})
        assert (unnamed.status_code, unnamed.json()["error"]["type"]) == (401, "authentication_error")


async def test_a_stream_that_breaks_is_an_error_event() -> None:
    async with sdk() as (client, c):
        c["P0"].usual = c["D0"].usual = streams(delta(content="hi"), then="break")
        with pytest.raises(anthropic.APIError, match="api_error"):
            async with client.messages.stream(model=MODEL, max_tokens=8, messages=ASK) as stream:
                [event async for event in stream]


async def test_how_it_ended_and_its_tokens_are_in_the_records() -> None:
    ended: list[Record] = []
    async with sdk("PD0") as (client, c):
        c.pipeline.records.ended.append(ended.append)
        await ask(client)
        async with client.messages.stream(model=MODEL, max_tokens=8, messages=ASK) as stream:
            await stream.get_final_message()
        await c.idle()
        assert c.metric("epd_proxy_requests_total", endpoint="/v1/messages", status="200") == 2
        assert c.metric("epd_proxy_tokens_total", kind="answer", path="PD", modality="text") == 4
    assert [(record.finish, record.prompt_tokens, record.completion_tokens) for record in ended] == [("stop", 5, 2)] * 2


async def test_unknown_fields_are_counted_and_what_changes_nothing_is_not() -> None:
    body = {"model": MODEL, "max_tokens": 4, "messages": ASK, "metadata": {"user_id": "u"}, "unheard_of": 1}
    cached = {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}, "own": 1}
    async with cluster("PD0") as c:
        c["PD0"].usual = vllm
        answer = await c.client.post("/v1/messages", json={**body, "messages": [{"role": "user", "content": [cached]}]})
        assert answer.status_code == 200, answer.text
        labels = {"endpoint": "/v1/messages"}
        assert c.metric("epd_proxy_fields_dropped_total", **labels, field="other") == 1
        assert c.metric("epd_proxy_fields_dropped_total", **labels, field="messages.content") == 1
        assert "metadata" not in c["PD0"].calls[0].body
    async with cluster("PD0", config=settings(strict_fields=True)) as c:
        refused = await c.client.post("/v1/messages", json=body)
        assert refused.status_code == 400 and "unheard_of" in refused.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
async def test_another_method_is_refused_in_anthropic_s_form(method: str, path: str) -> None:
    async with sdk("PD0") as (_, c):
        answer = await c.client.request(method, path)
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
        assert answer.json() == {
            "type": "error",
            "error": {"type": "invalid_request_error", "message": f"{method} {path}: Method Not Allowed"},
        }
        assert (await c.client.get("/v1/completions")).json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize("bad", [0, 1, 2])
async def test_the_image_at_fault_is_named_by_its_place_in_the_request(bad: int) -> None:
    """What tools gave back comes first in the chat, whatever stands before it in the request."""
    sources = [source(PNG), source(OTHER_PNG), source(PNG)]
    sources[bad]["data"] = "@"
    blocks = [{"type": "image", "source": one} for one in sources]
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "x"}, blocks[1]]}
    named = [
        "messages[1].content[0].source",
        "messages[1].content[1].content[1].source",
        "messages[1].content[2].source",
    ]
    async with sdk("E0", "PD0") as (client, _):
        with pytest.raises(anthropic.BadRequestError) as caught:
            await ask(
                client,
                [{"role": "system", "content": "x"}, {"role": "user", "content": [blocks[0], result, blocks[2]]}],
            )
    assert named[bad] in caught.value.message
    assert not [other for other in named if other != named[bad] and other in caught.value.message]
