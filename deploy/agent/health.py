"""One GET to a stage's /health, without an HTTP library: the launcher asks several times a second while it waits."""

from __future__ import annotations

import asyncio

from epd_serve import endpoint


async def health_status(url: str, timeout_s: float) -> int | None:
    """HTTP status of `GET /health`, or None when nothing answers HTTP there.

    Raises:
        TimeoutError: connected, but no answer in time (a busy server, not a dead one).
    """
    head = f"GET /health HTTP/1.1\r\nHost: {endpoint.for_http(url).netloc}\r\nConnection: close\r\n\r\n"
    reader = asyncio.StreamReader()
    async with asyncio.timeout(timeout_s):
        try:
            transport, _ = await endpoint.connect(url, lambda: asyncio.StreamReaderProtocol(reader))
        except OSError:
            return None
        try:
            transport.write(head.encode())
            words = (await reader.readline()).split()
        except (OSError, ValueError):  # ValueError: a first line that is longer than any of HTTP
            return None
        finally:
            transport.close()
    return int(words[1]) if len(words) >= 2 and words[1].isdigit() else None
