"""Stages that hold every request and never finish it, and know when its connection is lost. For measuring who lets go.

One server per role on loopback, in the caller's event loop. E and P never answer; D answers with the first token of a
stream where it is told to, and nothing more. Nothing is computed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import httptools

from epd_serve.roles import Role

HEALTHY = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
FIRST_TOKEN = b'data: {"object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
BEGUN = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n" % len(FIRST_TOKEN)
    + FIRST_TOKEN
    + b"\r\n"
)


class HoldingStages:
    """`urls` by role, while they serve.

    Attributes:
        begins: D sends a first token.
        held: requests that are held now. lost: when each connection with one was lost (`time.perf_counter`).
    """

    def __init__(self) -> None:
        self.urls: dict[Role, str] = {}
        self.begins = False
        self.held = 0
        self.lost: list[float] = []

    @asynccontextmanager
    async def serving(self, *roles: Role) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        servers = []
        try:
            for role in roles:
                server = await loop.create_server(lambda role=role: _Held(self, role), "127.0.0.1", 0)  # type: ignore[misc]
                servers.append(server)
                self.urls[role] = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            yield
        finally:
            for server in servers:
                server.close()


class _Held(asyncio.Protocol):
    """One connection of the proxy. Parser callbacks have httptools' names."""

    def __init__(self, stages: HoldingStages, role: Role) -> None:
        self._stages = stages
        self._role = role
        self._parser: Any = httptools.HttpRequestParser(self)
        self._holds = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, error: Exception | None) -> None:
        if self._holds:
            self._stages.held -= 1
            self._stages.lost.append(time.perf_counter())

    def on_message_complete(self) -> None:
        if self._parser.get_method() != b"POST":
            self._transport.write(HEALTHY)
            return
        self._holds = True
        self._stages.held += 1
        if self._role is Role.D and self._stages.begins:
            self._transport.write(BEGUN)
