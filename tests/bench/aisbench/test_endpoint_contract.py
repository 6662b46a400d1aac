"""What AISBench and vLLM bench count on in a server, item by item, held to our proxy over stages that speak as vLLM.

Held elsewhere: a failure after the first byte ends in one error event without `[DONE]` and an aborted connection, and a
stream is relayed byte for byte (tests/proxy/generate/test_step.py); `/v1/models` (tests/proxy/http/test_openai_sdk.py).
"""

from __future__ import annotations

import asyncio
import io
import json
from typing import Any

import httpx
import pytest
from PIL import Image
from starlette.types import Receive, Send

from bench.aisbench.rows import Shape, look
from bench.clients.target import Target
from proxy.config.settings import ModelIdentity
from tests.proxy.fakes import (
    DONE,
    MODEL,
    Call,
    FakeStage,
    chunk,
    cluster,
    data_url,
    opening,
    settings,
    streams,
    text_body,
)

CHAT = "/v1/chat/completions"
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}}\n\n'


def last(text: str) -> bytes:
    return b"data: " + json.dumps(
        {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": "length"}]}
    ).encode() + b"\n\n"  # fmt: skip


class Paced:
    """A stage that sends each event when it is told to."""

    def __init__(self, *events: bytes) -> None:
        self._events = events
        self.go = [asyncio.Event() for _ in events]

    async def __call__(self, stage: FakeStage, call: Call, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for event, go in zip(self._events, self.go, strict=True):
            await go.wait()
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def timed_body(**more: Any) -> dict[str, Any]:
    """As these clients ask."""
    return text_body(stream=True, stream_options={"include_usage": True}, ignore_eos=True, temperature=0.0, **more)


async def test_nothing_comes_before_the_first_token_and_the_role_comes_with_it() -> None:
    """They take the first thing that comes for the first token."""
    stage = Paced(opening(0), chunk("a"), DONE)
    async with cluster("PD0") as c:
        c["PD0"].script.append(stage)

        reads: list[bytes] = []

        async def read() -> None:
            async with c.client.stream("POST", CHAT, json=timed_body()) as response:
                async for part in response.aiter_bytes():
                    reads.append(part)

        asked = asyncio.create_task(read())
        await c["PD0"].until(lambda stage: stage.active == 1)
        stage.go[0].set()
        await c.client.get("/v1/models")  # the proxy was here: it has had its turns to pass on the role
        assert not asked.done() and reads == []
        for go in stage.go[1:]:
            go.set()
        await asked
        assert reads[0].startswith(opening(0) + chunk("a")), "in one read"


async def test_each_token_and_then_the_usage_come_when_the_stage_sends_them() -> None:
    """The usage apart from the last token, which says why the answer ended; times run to it."""
    events = (chunk("a"), last("b"), USAGE, DONE)
    stage = Paced(*events)
    async with cluster("PD0") as c:
        c["PD0"].script.append(stage)
        stage.go[0].set()
        async with asyncio.timeout(60), c.client.stream("POST", CHAT, json=timed_body()) as response:
            reads = response.aiter_bytes()
            for number, event in enumerate(events):
                assert await anext(reads) == event, "none waits for the next one"
                if number + 1 < len(events):
                    stage.go[number + 1].set()


async def test_the_look_before_a_load_finds_what_aisbench_will_count() -> None:
    async with cluster("PD0") as c:
        c["PD0"].script.append(streams(opening(0), chunk("a"), last("b"), USAGE, DONE))
        assert await asyncio.to_thread(look, Target(str(c.client.base_url)), MODEL) == Shape(1, 1)


@pytest.mark.parametrize(
    "more",
    [
        {"max_tokens": 64},
        {"max_completion_tokens": 64},
        {"max_tokens": 64, "max_completion_tokens": 64},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": False}},
    ],
)
async def test_what_they_ask_for_reaches_the_stage_as_it_is(more: dict[str, Any]) -> None:
    async with cluster("PD0") as c:
        response = await c.client.post(CHAT, json={**timed_body(), **more})
        assert response.status_code == 200, response.text
        sent = c["PD0"].calls[0].body
        assert {name: sent[name] for name in more} == more
        assert sent["ignore_eos"] is True and sent["stream"] is True


async def test_a_list_of_text_alone_is_text_and_asks_no_encoder() -> None:
    content = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    async with cluster("E0", "P0", "D0") as c:
        response = await c.client.post(CHAT, json=timed_body(messages=[{"role": "user", "content": content}]))
        assert response.status_code == 200, response.text
        assert c["E0"].calls == []
        assert c["D0"].calls[0].body["messages"][0]["content"] == content


def heavy(number: int) -> str:
    """A picture of some megabytes that is quick to make: stored, not compressed."""
    file = io.BytesIO()
    Image.new("RGB", (1600, 1100), (number, 0, 0)).save(file, "PNG", compress_level=0)
    return data_url(file.getvalue())


async def test_several_pictures_of_many_megabytes_are_taken() -> None:
    urls = [heavy(number) for number in range(2)]
    assert sum(map(len, urls)) > 12_000_000
    content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    body = timed_body(messages=[{"role": "user", "content": [*content, {"type": "text", "text": "which?"}]}])
    async with cluster("EPD0") as c:
        response = await c.client.post(CHAT, json=body)
        assert response.status_code == 200, response.text
        sent = c["EPD0"].calls[0].body["messages"][0]["content"]
        assert [part["type"] for part in sent] == ["image_url", "image_url", "text"]


async def test_the_model_is_listed_with_the_folder_it_lies_in(tmp_path) -> None:
    async with cluster("PD0", config=settings(identity=ModelIdentity(str(tmp_path)))) as c:
        assert await asyncio.to_thread(Target(str(c.client.base_url)).served) == [(MODEL, str(tmp_path))]


async def test_a_stream_that_breaks_is_no_success_to_a_client_that_looks_for_done() -> None:
    async with cluster("PD0") as c:
        c["PD0"].script.append(streams(chunk("a"), then="break"))
        with pytest.raises(httpx.RemoteProtocolError):
            await c.client.post(CHAT, json=timed_body())
