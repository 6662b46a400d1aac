"""A node's HTTP API on a socket in a folder, for tests that play the node in their own process or below it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.routing import Route

from proxy.server.uvicorn_server import serve

NODE_SOCKET = "node.sock"


def unix_transport(path: Path) -> httpx.AsyncHTTPTransport:
    """To such a socket."""
    return httpx.AsyncHTTPTransport(uds=str(path), limits=httpx.Limits(max_connections=None))


def on_socket(listening: socket.socket) -> Callable[[Sequence[Route]], Coroutine[Any, Any, None]]:
    """Has routes answered there, to whoever can connect."""
    return lambda routes: serve(Starlette(routes=[*routes]), sockets=[listening], grace_s=1.0)
