"""`/v1/responses` of a simulated stage, as vLLM writes it, and as the proxy and OpenAI's own client read it."""

from __future__ import annotations

import json
from typing import Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from epd_serve.sim.prompts import RESPONSES
from proxy.stages import sse
from tests.epd_serve.sim.served import MODEL, served


def asked(given: object = "hello", **more: object) -> dict[str, object]:
    return {"model": MODEL, "input": given, "max_output_tokens": 4, "request_id": "resp_r1", **more}


async def streamed(client: Any, body: dict[str, object]) -> list[bytes]:
    async with client.stream("POST", RESPONSES, json={**body, "stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        return sse.split(await response.aread())


def data_of(event: bytes) -> dict[str, Any]:
    name, _, data = event.strip().partition(b"\ndata: ")
    decoded: dict[str, Any] = json.loads(data)
    assert name == b"event: " + decoded["type"].encode()
    return decoded


async def test_an_answer_in_one_piece_is_what_openais_client_reads() -> None:
    async with served() as (_, client):
        answer = (await client.post(RESPONSES, json=asked(instructions="be kind"))).json()
    read = Response.model_validate(answer)
    assert read.id == "resp_r1" and read.output_text and read.instructions == "be kind"
    assert read.status == "incomplete" and read.incomplete_details is not None and read.usage is not None
    assert read.usage.output_tokens == 4 and read.usage.total_tokens == read.usage.input_tokens + 4


async def test_a_stream_says_the_same_event_by_event() -> None:
    async with served() as (_, client):
        whole = Response.model_validate((await client.post(RESPONSES, json=asked())).json())
        events = await streamed(client, asked())
    for event in events:
        TypeAdapter[Any](ResponseStreamEvent).validate_python(data_of(event))
    told = [data_of(event) for event in events]
    assert [one["sequence_number"] for one in told] == list(range(len(told)))
    assert "".join(one["delta"] for one in told if one["type"] == "response.output_text.delta") == whole.output_text
    assert Response.model_validate(told[-1]["response"]).output_text == whole.output_text


async def test_the_proxy_sees_where_a_stream_begins_and_ends() -> None:
    async with served() as (_, client):
        events = await streamed(client, asked())
    openings = [sse.Event(event).opening for event in events]
    assert openings == [True, True] + [False] * (len(events) - 2)
    assert [sse.Event(event).done for event in events] == [False] * (len(events) - 1) + [True]


async def test_what_is_wrong_with_the_input_is_said() -> None:
    async with served() as (_, client):
        for body in (asked([]), asked(3), asked(["x"]), asked(max_output_tokens=0)):
            assert (await client.post(RESPONSES, json=body)).status_code == 400, body
