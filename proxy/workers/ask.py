"""One question by HTTP to a process of this deployment, on a connection of its own."""

from __future__ import annotations

import asyncio
from functools import partial

from epd_serve import endpoint
from proxy.stages.client import Connection


class RefusedError(ConnectionError):
    """It answers with another status than 200."""


class TooLargeError(ValueError):
    """Its answer is larger than it may be."""


async def ask(
    url: str, path: str, *, body: bytes | None = None, headers: str = "", within_s: float, most_bytes: int
) -> bytes:
    """The body of the answer: to a GET, or with a body to a POST.

    Args:
        url: as of `epd_serve.endpoint`. headers: lines, each with its end.

    Raises:
        TimeoutError: no whole answer in time. RefusedError: another status than 200. TooLargeError.
        OSError: nobody is there, or the connection breaks.
    """
    address = endpoint.for_http(url)
    verb, length = ("GET", "") if body is None else ("POST", f"content-length: {len(body)}\r\n")
    head = f"{verb} {address.path.rstrip('/')}{path} HTTP/1.1\r\nhost: {address.netloc}\r\n{length}{headers}\r\n"
    async with asyncio.timeout(within_s):
        _, connection = await endpoint.connect(url, partial(Connection, _forget))
        try:
            await connection.send(head.encode(), body or b"")
            if (status := await connection.head()) != 200:
                raise RefusedError(f"it answers {status}")
            text = b""
            while chunk := await connection.read():
                text += chunk
                if len(text) > most_bytes:
                    raise TooLargeError(f"more than {most_bytes:,} bytes")
            return text
        finally:
            connection.close()


def _forget(_: Connection) -> None:
    """It was used once."""
