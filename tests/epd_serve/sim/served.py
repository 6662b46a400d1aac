"""A simulated stage in the test's own event loop, behind a real socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from epd_serve.roles import Role
from epd_serve.sim.engine import Engine
from epd_serve.sim.http import Connection
from epd_serve.sim.profile import Profile
from epd_serve.sim.stage import Stage
from epd_serve.wiring import StageWiring

MODEL = "sim"


@asynccontextmanager
async def served(
    profile: Profile | None = None, *, role: Role = Role.PD, key: str = "", priorities: bool = False
) -> AsyncIterator[tuple[Stage, httpx.AsyncClient]]:
    profile = profile or Profile()
    wiring = StageWiring(instance=f"{role}0", role=role, incarnation="test")
    engine = Engine(profile, wiring.instance, priorities=priorities)
    stage = Stage(wiring, profile, engine, model=MODEL, model_path=MODEL, key=key)
    connections: set[Connection] = set()
    listening = socket.create_server(("127.0.0.1", 0))
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(stage.handle, connections), sock=listening
    )
    running = asyncio.create_task(engine.run())
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    try:
        async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as client:
            yield stage, client
    finally:
        running.cancel()
        for connection in list(connections):
            connection.abort()
        server.close()
        await asyncio.wait([running])


def chat(text: str = "hello", **more: object) -> dict[str, object]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 4, **more}
