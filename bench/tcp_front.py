"""A TCP port in front of each stage's socket, for example proxies that know no other address. Bytes pass as they come.

`python -m bench.tcp_front PORT URL [PORT URL …]`. What it costs is part of what such a proxy takes beside ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from functools import partial

from deploy.host import event_loop
from epd_serve.endpoint import socket_path

CHUNK_BYTES = 256 << 10


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
    writer.close()


async def _front(url: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        answers, asks = await asyncio.open_unix_connection(socket_path(url))
    except OSError:
        writer.close()
        return
    await asyncio.gather(_pass_on(reader, asks), _pass_on(answers, writer))


async def _serve(pairs: Sequence[str]) -> None:
    for port, url in zip(pairs[::2], pairs[1::2], strict=True):
        await asyncio.start_server(partial(_front, url), "127.0.0.1", int(port))
    await asyncio.Event().wait()


if __name__ == "__main__":
    event_loop.run(_serve(sys.argv[1:]))
