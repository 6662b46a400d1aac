"""The admin listener: metrics, the status table, and what changes the deployment. A port of its own.

Whoever reaches the clients' port reaches none of this. In the process that tells the front doors of the instances.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.datastructures import Headers

from proxy.http import status
from proxy.http.app import add_error_seam
from proxy.registry.table import InstanceTable
from proxy.tenants.auth import AuthenticationError, bears


def check_key(headers: Headers, key: str) -> None:
    """Raises AuthenticationError: a key is wanted, and these headers have another one, or none."""
    if key and not bears(headers, key):
        raise AuthenticationError("Missing or wrong admin key: send it as `Authorization: Bearer <key>`.")


def create_admin(
    table: InstanceTable,
    metrics_text: Callable[[], Awaitable[bytes]],
    *,
    key: str = "",
    more: Sequence[APIRouter] = (),
) -> FastAPI:
    """The application.

    Args:
        key: bearer token that `/metrics` and `/instances` want, or "" for none. `/health` wants none.
        more: routes that want `key`, too.
    """
    app = FastAPI(title="EPD-Serve admin", docs_url=None, redoc_url=None, openapi_url=None)
    add_error_seam(app)

    def check(request: Request) -> None:
        check_key(request.headers, key)

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @app.get("/instances")
    async def instances(request: Request) -> Response:
        check(request)
        return JSONResponse(status.instances(table))

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        check(request)
        return PlainTextResponse(await metrics_text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi(request: Request) -> Response:
        check(request)
        return JSONResponse(app.openapi())

    for router in more:
        app.include_router(router, dependencies=[Depends(check)])
    return app
