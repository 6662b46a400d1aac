"""A stage that others can reach answers only who has its key."""

from __future__ import annotations

import httpx
import pytest
from fastapi import FastAPI, WebSocket
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from epd_serve.engine.stage_guard import KEY_ENV, StageGuard


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> FastAPI:
    monkeypatch.setenv(KEY_ENV, "right")
    app = FastAPI()
    app.add_middleware(StageGuard)

    @app.get("/{path:path}")
    async def anything(path: str) -> str:
        return path

    @app.websocket("/v1/realtime")
    async def realtime(socket: WebSocket) -> None:
        await socket.accept()

    return app


@pytest.mark.parametrize(
    "path", ["/v1/models", "/invocations", "/tokenize", "/metrics", "/health/", "/health/../x", "/"]
)
async def test_every_path_but_health_wants_the_key(guarded: FastAPI, path: str) -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(guarded), base_url="http://stage") as client:
        for key, status in (("Bearer right", 200), ("Bearer wrong", 401), ("right", 401), ("", 401)):
            headers = {"authorization": key} if key else {}
            assert (await client.get(path, headers=headers)).status_code == status


async def test_health_is_open_and_lifespan_passes(guarded: FastAPI) -> None:
    with TestClient(guarded) as client:
        assert client.get("/health").status_code == 200


def test_a_websocket_without_the_key_is_closed(guarded: FastAPI) -> None:
    client = TestClient(guarded)
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/v1/realtime"):
        pass
    with client.websocket_connect("/v1/realtime", headers={"authorization": "Bearer right"}):
        pass


def test_a_stage_without_a_key_does_not_come_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_ENV, raising=False)
    with pytest.raises(RuntimeError, match=KEY_ENV):
        StageGuard(FastAPI())
