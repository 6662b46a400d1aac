"""Where a stage's HTTP server answers, as one text: `http://HOST:PORT`, or `unix:/PATH` of a socket on this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import SplitResult, urlsplit

BACKLOG_FULL_S = 0.02
_UNIX = "unix:"
_Protocol = TypeVar("_Protocol", bound=asyncio.BaseProtocol)


def unix_url(path: object) -> str:
    """The text for a socket at this absolute path."""
    return f"{_UNIX}{path}"


def socket_path(url: str) -> str:
    """Of a Unix socket; "" for TCP."""
    return url.removeprefix(_UNIX) if url.startswith(_UNIX) else ""


def is_endpoint(url: str) -> bool:
    """Whether it is `unix:/PATH`, or http://HOST:PORT and nothing more; without a port it is 80."""
    if path := socket_path(url):
        return path.startswith("/")
    try:
        address = urlsplit(url)
        port = address.port  # raises when it is none
    except ValueError:
        return False
    plain = address.path in ("", "/") and not (address.query or address.fragment or "@" in address.netloc)
    return address.scheme == "http" and bool(address.hostname) and port != 0 and plain


def for_http(url: str) -> SplitResult:
    """What requests to it name: path and `netloc` are those of TCP, a socket is called `localhost`."""
    return urlsplit("http://localhost" if socket_path(url) else url)


async def connect(url: str, protocol: Callable[[], _Protocol]) -> tuple[asyncio.Transport, _Protocol]:
    """A connection to it, as of an event loop's `create_connection`. The caller bounds the wait. Raises OSError."""
    loop = asyncio.get_running_loop()
    if not (path := socket_path(url)):
        address = urlsplit(url)
        return await loop.create_connection(protocol, address.hostname or "", address.port or 80)
    while True:
        try:
            return await loop.create_unix_connection(protocol, path)
        except BlockingIOError:  # its backlog is full; over TCP the kernel would go on trying
            await asyncio.sleep(BACKLOG_FULL_S)
