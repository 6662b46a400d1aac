"""Streams of simulated stages whose stage is gone: another one goes on, and the client cannot tell but by a comment."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from epd_serve.instances import Instance
from epd_serve.roles import Role
from epd_serve.sim.profile import Profile
from proxy.config.settings import ModelIdentity, ProxySettings
from proxy.http.app import create_app
from proxy.pipeline import Pipeline
from proxy.registry.table import InstanceTable
from tests.epd_serve.sim.served import MODEL, chat, served
from tests.proxy.fakes import served as app_served
from tests.waiting import PATIENCE_S

CHAT = "/v1/chat/completions"


@dataclass
class Pairs:
    """Fused simulated stages behind a proxy. `stacks`: closing one ends that stage, its connections first."""

    client: httpx.AsyncClient
    pipeline: Pipeline
    table: InstanceTable
    stacks: dict[str, AsyncExitStack]
    before: httpx.AsyncClient

    async def kill(self, name: str) -> None:
        self.table.mark_down(name, "killed")
        await self.stacks[name].aclose()

    def metric(self, name: str, **labels: str) -> float:
        return self.pipeline.metrics.registry.get_sample_value(name, labels) or 0.0


@asynccontextmanager
async def pairs(
    *names: str, token_s: float = 0.005, flags: dict[str, Any] | None = None, **more: Any
) -> AsyncIterator[Pairs]:
    profile = Profile(decode_step_s=((1, token_s), (64, token_s)))
    table, stacks = InstanceTable(), {}
    settings = ProxySettings(served_models=(MODEL,), identity=ModelIdentity(MODEL), **more)
    app = create_app(settings, table)
    async with AsyncExitStack() as stack:
        for name in names:
            stacks[name] = await stack.enter_async_context(AsyncExitStack())
            _, stage = await stacks[name].enter_async_context(served(profile, role=Role.PD))
            one = Instance(name, Role.PD, str(stage.base_url).rstrip("/"), f"{name}-life", answer_flags=())
            table.apply(one)
        url = await stack.enter_async_context(app_served(app))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, trust_env=False))
        yield Pairs(client, app.state.pipeline, table, stacks, client)


async def stream(client: httpx.AsyncClient, body: dict[str, Any], on_event: Any = None, path: str = CHAT) -> bytes:
    got = b""
    async with client.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        async for part in response.aiter_bytes():
            got += part
            if on_event is not None:
                on_event(got)
    return got


def events(got: bytes) -> list[Any]:
    lines = [line for line in got.decode().split("\n\n") if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def told(got: bytes) -> dict[str, Any]:
    """What a client gathers from it, but for when it was."""
    assert got.endswith(b"data: [DONE]\n\n") and got.count(b"[DONE]") == 1
    said = events(got)
    choices = [choice for event in said for choice in event["choices"]]
    return {
        "text": "".join(choice["delta"].get("content") or "" for choice in choices),
        "finish": [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
        "usage": [event["usage"] for event in said if event.get("usage")],
        "roles": sum("role" in choice["delta"] for choice in choices),
        "ids": [token for choice in choices for token in choice.get("token_ids") or ()],
        "created": len({event["created"] for event in said}),
    }


@pytest.mark.parametrize(
    "more", [{}, {"seed": 1}, {"return_token_ids": True, "stream_options": {"include_usage": True}}], ids=repr
)
async def test_streams_of_a_stage_that_dies_are_whole(more: dict[str, Any]) -> None:
    async with pairs("PD0", "PD1") as p:
        bodies = [chat(f"question {number}", stream=True, max_tokens=60, **more) for number in range(12)]
        undisturbed = [told(await stream(p.client, body)) for body in bodies]
        halfway = asyncio.Event()

        def seen(got: bytes) -> None:
            if got.count(b"\n\n") > 20:
                halfway.set()

        streams = [asyncio.create_task(stream(p.client, body, seen)) for body in bodies]
        await halfway.wait()
        await p.kill("PD0")
        got = await asyncio.gather(*streams)
        assert [told(one) for one in got] == undisturbed
        moved = sum(b": x-epd-migrations: 1\n\ndata: [DONE]" in one for one in got)
        way = "replay" if "seed" in more else "fast"
        assert moved and p.metric("epd_proxy_migrations_total", way=way, outcome="went_on") == moved
        assert p.metric("epd_proxy_migration_gap_seconds_count") == moved


def message_of(got: bytes) -> tuple[str, dict[str, Any]]:
    """The text of a message's stream, and how it ended."""
    said = [json.loads(event.partition(b"\ndata: ")[2]) for event in got.split(b"\n\n") if event.startswith(b"event:")]
    kinds = [event["type"] for event in said]
    assert kinds[:2] == ["message_start", "content_block_start"] and kinds.count("content_block_start") == 1
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    text = "".join(event["delta"]["text"] for event in said if event["type"] == "content_block_delta")
    return text, {**said[-2], "input_tokens": said[0]["message"]["usage"]["input_tokens"]}


async def test_a_message_of_a_stage_that_dies_is_whole() -> None:
    async with pairs("PD0", "PD1") as p:
        asked = [{"role": "user", "content": "question"}]
        body = {"model": MODEL, "messages": asked, "max_tokens": 60, "stream": True}
        undisturbed = message_of(await stream(p.client, body, path="/v1/messages"))
        halfway = asyncio.Event()

        def seen(got: bytes) -> None:
            if got.count(b"\n\n") > 20:
                halfway.set()

        streams = [asyncio.create_task(stream(p.client, body, seen, path="/v1/messages")) for _ in range(8)]
        await halfway.wait()
        await p.kill("PD0")
        got = await asyncio.gather(*streams)
        assert [message_of(one) for one in got] == [undisturbed] * 8
        moved = sum(b": x-epd-migrations: 1\n\n" in one for one in got)
        assert moved and p.metric("epd_proxy_migrations_total", way="fast", outcome="went_on") == moved
