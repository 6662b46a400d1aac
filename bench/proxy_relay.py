"""The bare relay: what a proxy costs that only passes bytes on, with the same HTTP server and client as ours.

`python -m bench.proxy_relay PORT URL…`. Takes a request whole, sends it to one stage after another in turn, and passes
the answer on as it comes. No parsing, no checks, no choice, no retries, no watch for clients that leave: the least that
any proxy on this server and this client does, and so the base of `rps_over_bare_relay`.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Any

import aiohttp
import uvicorn
from starlette.types import Receive, Scope, Send

PASSED_ON = {b"content-type", b"content-length"}


class BareRelay:
    """The application. `urls`: the stages."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = itertools.cycle(urls)
        self._session: Any = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body", False):
                break
        url = next(self._urls) + scope["path"]
        async with self._session.post(url, data=body, headers={"content-type": "application/json"}) as answer:
            headers = [pair for pair in answer.raw_headers if pair[0].lower() in PASSED_ON]
            await send({"type": "http.response.start", "status": answer.status, "headers": headers})
            while chunk := await answer.content.readany():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False
        )
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._session.close()
        await send({"type": "lifespan.shutdown.complete"})


def main(argv: Sequence[str]) -> None:
    port, *urls = argv
    uvicorn.run(
        BareRelay(urls),
        host="127.0.0.1",
        port=int(port),
        log_level="warning",
        access_log=False,
        loop="uvloop",
        http="httptools",
        server_header=False,
        proxy_headers=False,
        lifespan="on",
    )


if __name__ == "__main__":
    main(sys.argv[1:])
