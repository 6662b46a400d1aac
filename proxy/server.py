"""Run an application on uvicorn inside the caller's event loop. Signals stay with the caller (the launcher)."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from epd_serve.errors import ConfigError
from proxy.redact import redact_logs

BACKLOG = 2048
KEEPALIVE_S = 65


class _Server(uvicorn.Server):
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
    app: FastAPI, host: str, port: int, *, sockets: Sequence[socket.socket] | None = None, grace_s: float = 3.0
) -> None:
    """Serve until cancelled.

    Args:
        sockets: from `bind`, instead of `host` and `port`; closed at the end.
        grace_s: how long a cancelled server lets its requests finish before it cancels them.

    Raises:
        ConfigError: as `bind`.
    """
    listening = list(sockets) if sockets is not None else [bind(host, port)]
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEPALIVE_S,
        timeout_graceful_shutdown=max(1, round(grace_s)),
        server_header=False,
        http="httptools",
        ws="none",
        lifespan="on",
    )
    redact_logs()  # after uvicorn has set up its own logging
    server = _Server(config)
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
