"""Run an application on uvicorn inside the caller's event loop. Signals stay with the caller (the launcher)."""

from __future__ import annotations

import asyncio
import errno
import math
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI

from epd_serve.errors import ConfigError
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
        idle: IdleClients,
        background: Background,
    ) -> None:
        super().__init__(config)
        self._shared = shared
        self._say_started = started
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


def bind(host: str, port: int) -> socket.socket:
    """A bound TCP socket; port 0 picks a free one. Bind early, so that a port in use ends the launch at once.

    Raises:
        ConfigError: naming `--port` or `--host` and the fix.
    """
    if not 0 <= port <= 65535:  # getaddrinfo takes 65536 and means 0
        raise ConfigError(f"--port {port} is not between 0 and 65535", param="--port")
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no host name"
        raise ConfigError(f"--host {host}: cannot be resolved ({reason})", param="--host") from error
    bound = socket.socket(info[0], info[1], info[2])
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(info[4])
        bound.setblocking(False)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            fix = f"choose another with --port, or end what listens there (ss -ltnp 'sport = :{port}')"
            raise ConfigError(f"--port {port} is in use on {host}: {fix}", param="--port") from error
        if error.errno == errno.EACCES:
            raise ConfigError(f"--port {port} needs privileges: choose one above 1023", param="--port") from error
        raise ConfigError(f"--host {host}: cannot listen there ({error.strerror})", param="--host") from error
    return bound


async def serve(
    app: FastAPI,
    host: str,
    port: int,
    *,
    sockets: Sequence[socket.socket] | None = None,
    shared: SharedListener | None = None,
    grace_s: float = 3.0,
    started: Callable[[], None] = lambda: None,
    idle_timeouts: IdleTimeouts = IDLE_TIMEOUTS,
    background: Background | None = None,
) -> None:
    """Serve until cancelled.

    Args:
        sockets: from `bind`, instead of `host` and `port`; closed at the end.
        shared: takes the connections, instead of sockets.
        grace_s: how long a cancelled server lets its requests finish before it cancels them.
        started: called once connections are taken.
        patience: with clients that do nothing.
        background: takes what goes wrong between requests.

    Raises:
        ConfigError: as `bind`.
    """
    listening = list(sockets) if sockets is not None else []
    if sockets is None and shared is None:
        listening = [bind(host, port)]
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
    server = _Server(config, shared, started, IdleClients(idle_timeouts), background or Background())
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
