"""A node's HTTP API on a socket in a folder, for tests that play the node in their own process or below it."""

from __future__ import annotations

from pathlib import Path

import httpx

NODE_SOCKET = "node.sock"


def unix_transport(path: Path) -> httpx.AsyncHTTPTransport:
    """To such a socket."""
    return httpx.AsyncHTTPTransport(uds=str(path), limits=httpx.Limits(max_connections=None))
