"""The bare relay: what a proxy costs that only passes bytes on, with the HTTP server and the client that one takes.

`python -m bench.proxy.relay PORT URL…`. Takes a request whole, sends it to one stage after another in turn, and
passes the answer on as it comes. No parsing, no checks, no choice, no retries, no watch for clients that leave: the
least that any proxy on uvicorn and aiohttp does, and so the base of `rps_over_bare_relay`. Ours is on uvicorn, too; its
client is its own (`proxy/stages/client.py`), which is part of what is compared.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Any

import aiohttp
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from epd_serve.endpoint import for_http, socket_path

PASSED_ON = {b"content-type", b"content-length"}


def bare_relay(urls: Sequence[str]) -> ASGIApp:
    """Returns the application. `urls`: the stages."""
    stages = itertools.cycle(urls)
    sessions: dict[str, aiohttp.ClientSession] = {}  # of the server's event loop, which runs only later

    async def relay(scope: Scope, receive: Receive, send: Send) -> None:
        url = next(stages)
        if url not in sessions:
            path, usual = socket_path(url), dict[str, Any](limit=0, keepalive_timeout=2.0)
            connector = aiohttp.UnixConnector(path, **usual) if path else aiohttp.TCPConnector(**usual)
            timeout = aiohttp.ClientTimeout(total=None)
            sessions[url] = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
        target = for_http(url).geturl() + scope["path"]
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        headers = {"content-type": "application/json"}
        async with sessions[url].post(target, data=body, headers=headers) as answer:
            kept = [pair for pair in answer.raw_headers if pair[0].lower() in PASSED_ON]
            await send({"type": "http.response.start", "status": answer.status, "headers": kept})
            while chunk := await answer.content.readany():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    return relay


def main(argv: Sequence[str]) -> None:
    port, *urls = argv
    uvicorn.run(
        bare_relay(urls),
        host="127.0.0.1",
        port=int(port),
        log_level="warning",
        access_log=False,
        loop="uvloop",
        http="httptools",
        server_header=False,
        proxy_headers=False,
        lifespan="off",
    )


if __name__ == "__main__":
    main(sys.argv[1:])
