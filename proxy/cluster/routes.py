"""The cluster's calls on the admin listener of its head: join, beat and leave, for holders of the cluster key only.

Client API keys mean nothing here, and the cluster key means nothing on the clients' port. The key is compared before a
byte of the body is read.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response

from epd_serve.cluster import BEAT, JOIN, LEAVE, Beat, JoinRequest, Leave, Left
from epd_serve.errors import PayloadTooLargeError, RequestError
from proxy.cluster.membership import Membership
from proxy.tenants.auth import AuthenticationError, bears

MAX_BODY_BYTES = 64 << 10
Message = TypeVar("Message")


def add_cluster_routes(app: FastAPI, members: Membership, cluster_key: str) -> None:
    """Make an application a head's. Errors leave through the application's own seam."""

    async def call(request: Request) -> Response:
        raw = await _body(request, cluster_key)
        status, body = await _take_in(members, request.url.path, request.client.host if request.client else "", raw)
        return Response(body, status, media_type="application/json" if body else None)

    for path in (JOIN, BEAT, LEAVE):
        app.add_api_route(path, call, methods=["POST"])


async def _take_in(members: Membership, path: str, caller: str, raw: bytes) -> tuple[int, bytes]:
    """Have the membership take in one message. Returns status and body of the answer.

    Raises:
        RequestError: it is malformed. JoinRefusedError, NotAMemberError: as `Membership`.
    """
    if path == JOIN:
        return 200, msgspec.json.encode(members.join(_message(raw, JoinRequest), caller))
    if path == LEAVE:
        return 200, msgspec.json.encode(Left(await members.leave(_message(raw, Leave))))
    assert path == BEAT, f"{path} is no path of a cluster"
    members.beat(_message(raw, Beat))
    return 204, b""


async def _body(request: Request, cluster_key: str) -> bytes:
    """Check the key, then read the body. Raises AuthenticationError, PayloadTooLargeError."""
    if not bears(request.headers, cluster_key):
        raise AuthenticationError("This is not the cluster key.", code="wrong_cluster_key")
    raw = b""
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > MAX_BODY_BYTES:
            raise PayloadTooLargeError(f"a message of the cluster has at most {MAX_BODY_BYTES} bytes")
    return raw


def _message(raw: bytes, kind: type[Message]) -> Message:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # all three are what the bytes can cause
        raise RequestError(f"not a {kind.__name__}: {error}", code="malformed_message") from error
