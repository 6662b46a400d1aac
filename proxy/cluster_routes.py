"""The cluster's side door on the proxy's server: join, beat and leave, for holders of the cluster key only.

Client API keys mean nothing here, and the cluster key means nothing at the front door. The key is compared before a
byte of the body is read.
"""

from __future__ import annotations

import hmac
from typing import TypeVar

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response

from epd_serve.cluster import BEAT, JOIN, LEAVE, Beat, JoinRequest, Leave, Left
from epd_serve.errors import PayloadTooLargeError, RequestError
from proxy.auth import AuthenticationError
from proxy.cluster import Membership

MAX_BODY_BYTES = 64 << 10
Message = TypeVar("Message")


def add_cluster_routes(app: FastAPI, members: Membership, cluster_key: str) -> None:
    """Make an application a head. Errors leave through the application's own seam."""

    @app.post(JOIN)
    async def join(request: Request) -> Response:
        message = await _message(request, cluster_key, JoinRequest)
        return _answer(members.join(message, request.client.host if request.client else ""))

    @app.post(BEAT)
    async def beat(request: Request) -> Response:
        members.beat(await _message(request, cluster_key, Beat))
        return Response(status_code=204)

    @app.post(LEAVE)
    async def leave(request: Request) -> Response:
        return _answer(Left(await members.leave(await _message(request, cluster_key, Leave))))


async def _message(request: Request, cluster_key: str, kind: type[Message]) -> Message:
    """Check the key, then read and decode the body.

    Raises:
        AuthenticationError, PayloadTooLargeError, RequestError.
    """
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    right = hmac.compare_digest(token.strip().encode("utf-8", "replace"), cluster_key.encode())
    if scheme.lower() != "bearer" or not right:
        raise AuthenticationError("This is not the cluster key.", code="wrong_cluster_key")
    raw = b""
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > MAX_BODY_BYTES:
            raise PayloadTooLargeError(f"a message of the cluster has at most {MAX_BODY_BYTES} bytes")
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # all three are what the bytes can cause
        raise RequestError(f"not a {kind.__name__}: {error}", code="malformed_message") from error


def _answer(message: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(message), media_type="application/json")
