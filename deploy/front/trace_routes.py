"""`GET /traces`, for `epd-serve trace`: the stamps of some requests, with the clocks that they are made by."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Query
from fastapi.responses import Response

from deploy.front.traced import Traced, about_requests
from proxy.records.records import MOST

Ids = Annotated[list[str], Query(max_length=MOST, description="Of requests, as `/requests` tells them; repeatable.")]


def trace_routes(traced: Traced) -> APIRouter:
    """Without `--trace-dir` nothing is stamped, and the clocks are all that is told."""
    router = APIRouter(tags=["requests"])

    @router.get("/traces", operation_id="traces")
    async def traces(request: Ids) -> Response:
        nodes = await about_requests(traced, request)
        return Response(msgspec.json.encode({"nodes": nodes}), media_type="application/json")

    return router
