"""What became of requests, on the admin listener: one of them, the newest, slowest or failed ones, the last minute."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import JSONResponse, Response

from epd_serve.errors import NotFoundError
from proxy.records.counts import MINUTE_S, Counts
from proxy.records.records import MOST, Question, RecordsAnswer

Look = Callable[[Question], Awaitable[RecordsAnswer]]
"""Asks every front door."""

ID_CHARS = 128
Name = Annotated[
    str, Path(max_length=ID_CHARS, description="`x-request-id` of the answer: the server's name, or the client's own.")
]
Order = Annotated[Literal["newest", "slowest", "failed"], Query(description="Which first, and of `failed` only those.")]
Limit = Annotated[int, Query(ge=1, le=MOST)]


def everybody(_: Request) -> str:
    """Whoever asks may know of all tenants' requests."""
    return ""


def request_routes(look: Look, tenant: Callable[[Request], str] = everybody) -> APIRouter:
    """`/requests` and what is below it, and `/rates`.

    Args:
        tenant: of whoever asks, who is told of no other's requests; "" for all. May raise AuthenticationError.
    """
    router = APIRouter(tags=["requests"])

    @router.get("/requests", operation_id="requests")
    async def requests(asked: Request, order: Order = "newest", limit: Limit = 20) -> Response:
        answer = await look(Question(order=order, limit=limit, tenant=tenant(asked)))
        return JSONResponse({"requests": answer.requests})

    @router.get("/requests/{name:path}", operation_id="request")
    async def request(asked: Request, name: Name) -> Response:
        requests = (await look(Question(id=name, tenant=tenant(asked)))).requests
        if not requests:
            raise NotFoundError(
                f"no front door remembers a request {name}: it may be too long ago (records.requests, "
                "records.size_bytes), or the front door that had it has ended",
                code="unknown_request",
            )
        return JSONResponse({"request": requests[0], "others": [one["id"] for one in requests[1:]]})

    @router.get("/rates", operation_id="rates")
    async def rates(asked: Request) -> Response:
        answer = await look(Question(window_s=MINUTE_S, tenant=tenant(asked)))
        return JSONResponse((answer.counts or Counts()).summary())

    return router
