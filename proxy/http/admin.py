"""The admin listener: metrics, the status table, what became of requests, and what changes the deployment.

A port of its own: whoever reaches the clients' port reaches none of this. In the process that tells the front doors of
the instances. A browser on the host reaches it, too, whatever page it shows: so no other page may ask here, and without
a key nothing can be changed, nor asked for by a name, which its owner could point here (DNS rebinding).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Literal
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends, FastAPI, Path, Query, Request
from fastapi.responses import Response
from starlette.datastructures import Headers

from epd_serve.errors import NotFoundError, RequestError
from proxy.http import status
from proxy.http.app import WITHOUT_PAGES, add_error_seam, json_answer, observing_routes
from proxy.records.counts import MINUTE_S, Counts
from proxy.records.records import MOST, Question, RecordsAnswer
from proxy.registry.table import InstanceTable
from proxy.tenants import AuthenticationError, bears

Look = Callable[[Question], Awaitable[RecordsAnswer]]
"""Asks every front door."""


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

    async def check_page(request: Request) -> None:
        if not trusted:
            check_sender(request, key)

    async def check(request: Request) -> None:
        check_key(request.headers, key)

    app = FastAPI(title="EPD-Serve admin", dependencies=[Depends(check_page)], **WITHOUT_PAGES)
    add_error_seam(app)

    @app.get("/health")
    async def health(request: Request, role: str | None = None) -> Response:
        if role is None:
            return json_answer(status.Health("ok"))
        await check(request)
        code, body = status.health_of(role, table)
        return json_answer(body, code)

    keyed = APIRouter()

    @keyed.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        return json_answer(app.openapi())

    for router in (keyed, observing_routes(lambda: status.instances(table), metrics_text), *more):
        app.include_router(router, dependencies=[Depends(check)])
    return app


def everybody(_: Request) -> str:
    """Whoever asks may know of all tenants' requests."""
    return ""


def request_routes(look: Look, tenant: Callable[[Request], str] = everybody) -> APIRouter:
    """What became of requests: `/requests` (the newest, slowest or failed ones), `/requests/ID`, and `/rates`, the last
    minute.

    Args:
        tenant: of whoever asks, who is told of no other's requests; "" for all. May raise AuthenticationError.
    """
    router = APIRouter(tags=["requests"])

    @router.get("/requests", operation_id="requests")
    async def requests(
        asked: Request,
        order: Annotated[
            Literal["newest", "slowest", "failed"], Query(description="Which first, and of `failed` only those.")
        ] = "newest",
        limit: Annotated[int, Query(ge=1, le=MOST)] = 20,
    ) -> Response:
        answer = await look(Question(order=order, limit=limit, tenant=tenant(asked)))
        return json_answer({"requests": answer.requests})

    @router.get("/requests/{name:path}", operation_id="request")
    async def request(
        asked: Request,
        name: Annotated[
            str,
            Path(max_length=128, description="`x-request-id` of the answer: the server's name, or the client's own."),
        ],
    ) -> Response:
        found = (await look(Question(id=name, tenant=tenant(asked)))).requests
        if not found:
            raise NotFoundError(
                f"no front door remembers a request {name}: it may be too long ago (records.requests, "
                "records.size_bytes), or the front door that had it has ended",
                code="unknown_request",
            )
        return json_answer({"request": found[0], "others": [one["id"] for one in found[1:]]})

    @router.get("/rates", operation_id="rates")
    async def rates(asked: Request) -> Response:
        answer = await look(Question(window_s=MINUTE_S, tenant=tenant(asked)))
        return json_answer((answer.counts or Counts()).summary())

    return router
