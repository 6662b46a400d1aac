"""The admin listener: metrics, the status table, and what changes the deployment. A port of its own.

Whoever reaches the clients' port reaches none of this. In the process that tells the front doors of the instances. A
browser on the host reaches it, too, whatever page it shows: so no other page may ask here, and without a key nothing
can be changed, nor asked for by a name, which its owner could point here (DNS rebinding).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.datastructures import Headers

from epd_serve.errors import RequestError
from proxy.http import status
from proxy.http.app import add_error_seam
from proxy.registry.table import InstanceTable
from proxy.tenants.auth import AuthenticationError, bears


class ForbiddenError(RequestError):
    """Another page, or another name, than the listener answers to."""

    status = 403
    type = "permission_error"
    code = "wrong_origin"


def check_key(headers: Headers, key: str) -> None:
    """Raises AuthenticationError: a key is wanted, and these headers have another one, or none."""
    if key and not bears(headers, key):
        raise AuthenticationError("Missing or wrong admin key: send it as `Authorization: Bearer <key>`.")


def check_sender(request: Request, key: str) -> None:
    """Whether this may be asked here, `key` aside, which `check_key` looks at.

    Raises:
        ForbiddenError: a page from elsewhere asks; or, without a key, the listener is asked by a name.
        AuthenticationError: without a key something is to be changed.
    """
    host, origin = request.headers.get("host", ""), request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != host:
        raise ForbiddenError(f"Pages of {origin} may not ask the admin listener, which is {host}.")
    if key:
        return
    name = urlsplit(f"//{host}").hostname or ""
    if name != "localhost" and not _is_address(name):
        raise ForbiddenError(
            f"The admin listener has no key, so it answers to localhost and to addresses, not to {name!r}: ask it by "
            "its address, or give it a key (--admin-key-file)."
        )
    if request.method not in ("GET", "HEAD"):
        raise AuthenticationError(
            "The admin listener has no key, so nothing can be changed here: give it one (--admin-key-file), or give "
            "commands on the host, as `epd-serve scale`."
        )


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def create_admin(
    table: InstanceTable,
    metrics_text: Callable[[], Awaitable[bytes]],
    *,
    key: str = "",
    trusted: bool = False,
    more: Sequence[APIRouter] = (),
) -> FastAPI:
    """The application.

    Args:
        key: bearer token that all but `/health` without a role wants; "" for none, and then nothing can be changed.
        trusted: only the operator reaches it, as a socket in a folder of mode 0700: nobody is asked for anything.
        more: routes that want `key`, too.
    """

    def allowed(request: Request) -> None:
        if not trusted:
            check_sender(request, key)

    app = FastAPI(
        title="EPD-Serve admin", docs_url=None, redoc_url=None, openapi_url=None, dependencies=[Depends(allowed)]
    )
    add_error_seam(app)

    def check(request: Request) -> None:
        check_key(request.headers, key)

    @app.get("/health")
    async def health(request: Request, role: str | None = None) -> Response:
        if role is None:
            return JSONResponse({"status": "ok"})
        check(request)
        code, body = status.health_of(role, table)
        return JSONResponse(body, code)

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
