"""The admin listener: metrics, the status table, and at a head the calls of the cluster. A port of its own.

Whoever reaches the clients' port reaches none of this. In one process with the table: of several proxy processes that
is their parent.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from proxy.cluster.membership import Membership
from proxy.cluster.routes import add_cluster_routes
from proxy.http import status
from proxy.http.app import add_error_seam
from proxy.registry.table import InstanceTable
from proxy.stages.circuits import Circuits
from proxy.tenants.auth import AuthenticationError, bears


def create_admin(
    table: InstanceTable,
    metrics_text: Callable[[], Awaitable[bytes]],
    *,
    key: str = "",
    circuits: Circuits | None = None,
    members: Membership | None = None,
    cluster_key: str = "",
) -> FastAPI:
    """The application.

    Args:
        key: bearer token that `/metrics` and `/instances` want, or "" for none. `/health` wants none.
        circuits: of the proxy, where one process has all of them.
        members, cluster_key: of the head of a cluster: `/cluster/*` wants the cluster's key.
    """
    app = FastAPI(title="EPD-Serve admin", docs_url=None, redoc_url=None, openapi_url=None)
    add_error_seam(app)

    def check(request: Request) -> None:
        if key and not bears(request.headers, key):
            raise AuthenticationError("Missing or wrong admin key: send it as `Authorization: Bearer <key>`.")

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @app.get("/instances")
    async def instances(request: Request) -> Response:
        check(request)
        return JSONResponse(status.instances(table, circuits))

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        check(request)
        return PlainTextResponse(await metrics_text(), media_type=CONTENT_TYPE_LATEST)

    if members is not None:
        add_cluster_routes(app, members, cluster_key)
    return app
