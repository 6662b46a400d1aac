"""Stages that hold requests: what they count, and when they notice that they are let go of."""

from __future__ import annotations

import asyncio

from bench.clients.http import connect, post
from epd_serve.roles import Role
from tests.soak.holding_stages import HoldingStages
from tests.waiting import PATIENCE_S


async def until(condition: object) -> None:
    assert callable(condition)
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.001)


async def test_a_request_is_held_until_its_connection_is_lost() -> None:
    stages = HoldingStages()
    async with stages.serving(Role.P):
        connection = await connect(stages.urls[Role.P])
        connection.send(post(stages.urls[Role.P], "/v1/completions", b"{}"))
        await until(lambda: stages.held == 1)
        assert not connection.begun and not stages.lost
        connection.close()
        await until(lambda: not stages.held)
        assert len(stages.lost) == 1


async def test_only_decode_begins_to_answer_and_only_where_it_is_told_to() -> None:
    stages = HoldingStages()
    stages.begins = True
    async with stages.serving(Role.P, Role.D):
        connections = {role: await connect(url) for role, url in stages.urls.items()}
        for role, connection in connections.items():
            connection.send(post(stages.urls[role], "/v1/completions", b"{}"))
        await until(lambda: stages.held == 2 and connections[Role.D].begun)
        assert not connections[Role.P].begun
        for connection in connections.values():
            connection.close()
        await until(lambda: not stages.held)


async def test_health_is_answered_and_holds_nothing() -> None:
    stages = HoldingStages()
    async with stages.serving(Role.E):
        reader, writer = await asyncio.open_connection(*stages.urls[Role.E].removeprefix("http://").split(":"))
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(PATIENCE_S):
            assert b"200" in await reader.readline()
        writer.close()
        assert not stages.held and not stages.lost
