"""Run an application on uvicorn inside the caller's event loop. Signals stay with the caller (the launcher)."""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette

from proxy.background import Background
from proxy.redact import redact_logs
from proxy.server.http_protocol import FrontProtocol
from proxy.server.idle_clients import IdleClients, IdleTimeouts
from proxy.server.shared_listener import SharedListener

BACKLOG = 2048
IDLE_TIMEOUTS = IdleTimeouts()


class _Server(uvicorn.Server):
    def __init__(
        self,
        config: uvicorn.Config,
        shared: SharedListener | None,
        started: Callable[[], None],
        ends: Callable[[], None],
        idle: IdleClients,
        background: Background,
    ) -> None:
        super().__init__(config)
        self._shared = shared
        self._say_started = started
        self._say_ends = ends
        self._idle = idle
        self._background = background

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._shared is not None:
            self._shared.start(self._protocol, self.server_state.connections)
        self._say_started()

    async def on_tick(self, counter: int) -> bool:
        with self._background.handling("look at clients"):  # or the whole server would end of it
            # All of them are FrontProtocols, as `serve` configures it.
            self._idle.look(self.server_state.connections, time.monotonic())  # type: ignore[arg-type]
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._say_ends()
        if self._shared is not None:
            self._shared.stop()
        await super().shutdown(sockets)

    def _protocol(self) -> asyncio.Protocol:
        kind: Any = self.config.http_protocol_class
        state = self.lifespan.state
        protocol: asyncio.Protocol = kind(config=self.config, server_state=self.server_state, app_state=state)
        return protocol

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(
    app: Starlette,
    *,
    sockets: Sequence[socket.socket] = (),
    shared: SharedListener | None = None,
    grace_s: float = 3.0,
    started: Callable[[], None] = lambda: None,
    ends: Callable[[], None] = lambda: None,
    idle_timeouts: IdleTimeouts = IDLE_TIMEOUTS,
    background: Background | None = None,
) -> None:
    """Serve until cancelled.

    Args:
        sockets: bound; closed at the end. shared: takes the connections, instead of sockets.
        grace_s: how long a cancelled server lets its requests finish before it cancels them.
        started: called once connections are taken.
        ends: called once none are taken any more: answers that would go on for ever are to end.
        idle_timeouts: of clients that do nothing.
        background: takes what goes wrong between requests.
    """
    listening = list(sockets)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        backlog=BACKLOG,
        timeout_keep_alive=math.ceil(idle_timeouts.keep_alive_s),
        timeout_graceful_shutdown=max(1, round(grace_s)),
        server_header=False,
        proxy_headers=False,  # the only address that counts is the connection's own
        http=FrontProtocol,
        ws="none",
        lifespan="on",
    )
    redact_logs()  # after uvicorn has set up its own logging
    server = _Server(config, shared, started, ends, IdleClients(idle_timeouts), background or Background())
    try:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(server.serve(listening))
            try:
                await asyncio.shield(running)
            except asyncio.CancelledError:
                # Cancelling uvicorn would skip its shutdown: ask it, wait, and pass the cancellation on.
                server.should_exit = True
                await asyncio.shield(running)
                raise
    finally:
        for one in listening:
            one.close()
