"""Simulated stages in the test's own event loop, behind real sockets."""

from __future__ import annotations

import asyncio
import base64
import io
import socket
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
from PIL import Image

from epd_serve.peers import Peer, write_peers
from epd_serve.roles import Role
from epd_serve.sim.engine import Engine
from epd_serve.sim.faults import SimFaults
from epd_serve.sim.http import Connection
from epd_serve.sim.profile import Profile
from epd_serve.sim.request_lifecycle import RequestLifecycle
from epd_serve.sim.stage import Stage
from epd_serve.wiring import StageWiring
from store.arena import Arena
from tests.waiting import until

MODEL = "sim"
PEERS = "peers.json"


@asynccontextmanager
async def served(
    profile: Profile | None = None,
    *,
    role: Role = Role.PD,
    key: str = "",
    priorities: bool = False,
    wiring: StageWiring | None = None,
    takes_media: bool = True,
) -> AsyncIterator[tuple[Engine, httpx.AsyncClient]]:
    profile = profile or Profile()
    wiring = wiring or StageWiring(instance=f"{role}0", role=role, incarnation="test")
    engine = Engine(profile, wiring.instance, priorities=priorities)
    faults = SimFaults(lambda state: setattr(engine, "slowness", state.slow))
    lifecycle = RequestLifecycle(wiring, engine, faults)
    lifecycle.start()
    stage = Stage(engine, lifecycle, faults, model=MODEL, model_path=MODEL, key=key, takes_media=takes_media)
    connections: set[Connection] = set()
    listening = socket.create_server(("127.0.0.1", 0))
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(stage.handle, connections), sock=listening
    )
    running = asyncio.create_task(engine.run())
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    try:
        async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
            yield engine, client
    finally:
        running.cancel()
        for connection in list(connections):
            connection.abort()
        server.close()
        await asyncio.wait([running])
        lifecycle.close()


@dataclass
class Layout:
    """E-P-D. `wirings`, `engines`, `clients` by instance."""

    wirings: dict[str, StageWiring]
    engines: dict[str, Engine]
    clients: dict[str, httpx.AsyncClient]
    arena: Arena

    @property
    def kv_params(self) -> tuple[dict[str, object], dict[str, object]]:
        """Transfer params for P and for D of a new transfer."""
        transfer, p = uuid.uuid4().hex, self.wirings["P0"]
        peer = {"instance": "P0", "incarnation": p.incarnation, "endpoint": p.kv_endpoint}
        at_p = {"transfer_id": transfer, "incarnation": p.incarnation}
        return {"kv_transfer_params": at_p, "max_tokens": 1}, {
            "kv_transfer_params": {"transfer_id": transfer, "peer": peer}
        }


@asynccontextmanager
async def layout(
    folder: Path,
    shm: Path,
    profile: Profile | None = None,
    *,
    peers: Sequence[Peer] | None = None,
    **of_p: object,
) -> AsyncIterator[Layout]:
    """E0, P0 and D0 with an arena. `peers`: whom P0 is told of, where not of E0 and D0. `of_p`: other wiring of P0."""
    arena = Arena.create(shm, capacity_bytes=16 << 20, prefault=False)
    events = f"ipc://{folder}/E0.events"

    def wiring(role: Role, **more: object) -> StageWiring:
        return StageWiring(instance=f"{role}0", role=role, incarnation=f"{role}-life", **more)  # type: ignore[arg-type]

    e0, d0 = Peer("E0", Role.E, events=events), Peer("D0", Role.D, kv_workers=(f"ipc://{folder}/D0.kvw0",))
    write_peers(folder / PEERS, (e0, d0) if peers is None else peers)
    shared = {"arena": str(shm), "arena_id": "here"}
    wirings = {
        "E0": wiring(Role.E, **shared, publish=events, load_publish=f"ipc://{folder}/E0.load"),
        "P0": replace(
            wiring(
                Role.P,
                **shared,
                peers=str(folder / PEERS),
                publish=f"ipc://{folder}/P0.events",
                kv_endpoint=f"ipc://{folder}/P0.kv",
                kv_publish=f"ipc://{folder}/P0.kvnews{{rank}}",
            ),
            **of_p,  # type: ignore[arg-type]
        ),
        "D0": wiring(Role.D, kv_worker_endpoint=f"ipc://{folder}/D0.kvw{{rank}}"),
    }
    try:
        async with AsyncExitStack() as stack:
            pairs = {
                name: await stack.enter_async_context(served(profile, wiring=one)) for name, one in wirings.items()
            }
            engines = {name: engine for name, (engine, _) in pairs.items()}
            yield Layout(wirings, engines, {name: client for name, (_, client) in pairs.items()}, arena)
    finally:
        arena.close()
        Arena.unlink(shm)


def chat(text: str = "hello", **more: object) -> dict[str, object]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 4, **more}


def data_url(kind: str, width: int, height: int) -> str:
    raw = io.BytesIO()
    Image.new("RGB", (width, height), (200, 10, 10)).save(raw, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(raw.getvalue()).decode()}"


def looking(*keys: str, **more: object) -> dict[str, object]:
    """A chat with a picture of 4 tokens per key."""
    source = data_url("PNG", 56, 56)
    parts = [{"type": "image_url", "image_url": {"url": source}, "uuid": key} for key in keys]
    return {**chat(), "messages": [{"role": "user", "content": parts}], **more}


async def idle(engine: Engine) -> None:
    """Nothing is left in the engine, and no block is taken."""
    scheduler = engine.scheduler
    await until(lambda: not (scheduler.running or scheduler.waiting or scheduler.held))
    await until(lambda: scheduler.free_blocks == scheduler.blocks)
