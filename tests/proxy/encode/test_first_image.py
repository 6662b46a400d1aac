"""The first image at a front door waits for no import: that would hold up every request that is there."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

import httpx
import pytest

from epd_serve.roles import Role
from store.arena import Arena
from tests.proxy.fakes import FakeStage, data_url, encodes, image_body, image_file, served
from tests.waiting import PATIENCE_S

DOOR = """
import asyncio, socket, sys
from epd_serve.instances import Instance
from epd_serve.roles import Role
from proxy.config.settings import ModelIdentity, ProxySettings
from proxy.http.app import create_app
from proxy.registry.table import InstanceTable
from proxy.server.uvicorn_server import serve

arena, encoder, decoder = sys.argv[1:]
table = InstanceTable()
table.apply(Instance("E0", Role.E, encoder, "life"))
table.apply(Instance("PD0", Role.PD, decoder, "life"))
app = create_app(ProxySettings(served_models=("demo",), identity=ModelIdentity("demo"), arena=arena), table)

@app.get("/modules")
async def modules():
    return sorted(sys.modules)

listening = socket.create_server(("127.0.0.1", 0))
url = f"http://127.0.0.1:{listening.getsockname()[1]}"
asyncio.run(serve(app, sockets=[listening], started=lambda: print(url, flush=True)))
"""


@asynccontextmanager
async def door(arena: Path, *stages: str) -> AsyncIterator[httpx.AsyncClient]:
    """A front door in a process of its own, which tells what it has imported."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", DOOR, str(arena), *stages, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None, "a pipe"
        async with asyncio.timeout(PATIENCE_S):
            url = (await process.stdout.readline()).decode().strip()
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, trust_env=False) as client:
            yield client
    finally:
        process.kill()
        await process.wait()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
async def test_the_first_image_imports_nothing(kind: str) -> None:
    path = Path(f"/dev/shm/epd-test-{uuid4().hex}-arena")
    arena = Arena.create(path, 16 * 4096, slots=8, owners=4)
    encoder, decoder = FakeStage("E0", Role.E), FakeStage("PD0", Role.PD)
    encoder.usual = encodes()
    image = data_url(image_file(kind=kind), f"image/{kind.lower()}")
    try:
        async with served(encoder) as one, served(decoder) as other, door(path, one, other) as client:
            before = set((await client.get("/modules")).json())
            answer = await client.post("/v1/chat/completions", json=image_body(image))
            assert answer.status_code == 200 and len(encoder.calls) == 1
            assert set((await client.get("/modules")).json()) == before
            assert "numpy" not in before, "13 MiB of each front door, for an arena that is only asked"
    finally:
        arena.close()
        Arena.unlink(path)
