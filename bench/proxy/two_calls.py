"""The bare relay of P-D: what a proxy costs that makes the two calls of P-D, with the HTTP server and client that
`relay.py` has.

`python -m bench.proxy.two_calls PORT P_URL D_URL PEER`, with P as JSON (`epd_serve.wire`'s `peer`). Takes a request
whole, sends P the same prompt for one token and D the request, at once and under one transfer id, and passes D's answer
on as it comes. No checks, no choice, no retries, no watch for clients that leave: the least that any proxy does which
has both to call, and so the base of `pd_over_two_call_relay`. Server and client are written out again: `relay.py` is
frozen, and has nothing to share.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import msgspec
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from bench.proxy.relay import PASSED_ON
from epd_serve.endpoint import for_http, socket_path


def two_call_relay(prefill: str, decode: str, peer: Mapping[str, str]) -> ASGIApp:
    """Returns the application. `prefill`, `decode`: URLs of P and D. `peer`: P as D is told of it."""
    sessions: dict[str, aiohttp.ClientSession] = {}  # of the server's event loop, which runs only later

    def session(url: str) -> aiohttp.ClientSession:
        if url not in sessions:
            path, usual = socket_path(url), dict[str, Any](limit=0, keepalive_timeout=2.0)
            connector = aiohttp.UnixConnector(path, **usual) if path else aiohttp.TCPConnector(**usual)
            timeout = aiohttp.ClientTimeout(total=None)
            sessions[url] = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
        return sessions[url]

    async def have_kv_sent(path: str, body: bytes, headers: Mapping[str, str]) -> None:
        async with session(prefill).post(for_http(prefill).geturl() + path, data=body, headers=headers) as answer:
            await answer.read()

    async def relay(scope: Scope, receive: Receive, send: Send) -> None:
        raw, more = b"", True
        while more:
            message = await receive()
            raw, more = raw + message.get("body", b""), message.get("more_body", False)
        body, transfer_id = msgspec.json.decode(raw), secrets.token_hex(16)
        to_prefill = {
            **body,
            "stream": False,
            "max_tokens": 1,
            "kv_transfer_params": {"transfer_id": transfer_id, "incarnation": peer["incarnation"]},
        }
        to_decode = msgspec.json.encode({**body, "kv_transfer_params": {"transfer_id": transfer_id, "peer": peer}})
        headers = {"content-type": "application/json", "x-request-id": transfer_id}
        sends_kv = asyncio.create_task(have_kv_sent(scope["path"], msgspec.json.encode(to_prefill), headers))
        target = for_http(decode).geturl() + scope["path"]
        async with session(decode).post(target, data=to_decode, headers=headers) as answer:
            kept = [pair for pair in answer.raw_headers if pair[0].lower() in PASSED_ON]
            await send({"type": "http.response.start", "status": answer.status, "headers": kept})
            while chunk := await answer.content.readany():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await sends_kv
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    return relay


def main(argv: Sequence[str]) -> None:
    port, prefill, decode, peer = argv
    uvicorn.run(
        two_call_relay(prefill, decode, msgspec.json.decode(peer)),
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
