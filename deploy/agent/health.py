"""One GET to a stage's /health, without an HTTP library: the launcher asks several times a second while it waits."""

from __future__ import annotations

import asyncio

from store.addresses import authority


async def health_status(host: str, port: int, timeout_s: float) -> int | None:
    """HTTP status of `GET /health`, or None when nothing answers HTTP there.

    Raises:
        TimeoutError: connected, but no answer in time (a busy server, not a dead one).
    """
    async with asyncio.timeout(timeout_s):
        try:
            reader, writer = await asyncio.open_connection(host, port)
        except OSError:
            return None
        try:
            writer.write(f"GET /health HTTP/1.1\r\nHost: {authority(host, port)}\r\nConnection: close\r\n\r\n".encode())
            await writer.drain()
            words = (await reader.readline()).split()
        except (OSError, ValueError):  # ValueError: a first line that is longer than any of HTTP
            return None
        finally:
            writer.close()
    return int(words[1]) if len(words) >= 2 and words[1].isdigit() else None
