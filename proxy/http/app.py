"""The OpenAI front door: routes and the error seam. Everything else is in the parts that `Pipeline` puts together."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from epd_serve.errors import EpdError, NotFoundError, RequestError
from proxy.background import Background
from proxy.config.settings import ProxySettings
from proxy.errors import error_body, error_headers, internal_error
from proxy.http import status
from proxy.http.exchange import Exchange
from proxy.http.openapi import document as openapi_document
from proxy.http.unserved import unserved
from proxy.media.fetch import Resolver, resolve
from proxy.pipeline import Pipeline
from proxy.registry.table import InstanceTable
from proxy.request.parse import Endpoint

logger = logging.getLogger(__name__)


def create_app(
    settings: ProxySettings,
    table: InstanceTable,
    *,
    media_transport: httpx.AsyncBaseTransport | None = None,
    resolver: Resolver = resolve,
    metrics_text: Callable[[Pipeline], Awaitable[bytes]] | None = None,
    background: Background | None = None,
) -> FastAPI:
    """The proxy's application.

    Args:
        settings: see `ProxySettings`. table: kept up to date by the launcher, in the same event loop.
        media_transport, resolver: replace the network towards media hosts.
        metrics_text: answers `/metrics`, where this is not the only process to count.
        background: of the process, where it runs more than the application's own tasks.

    `/metrics` and `/instances` are here unless the settings say that an admin listener has them
    (`proxy/http/admin.py`).

    The pipeline is at `app.state.pipeline`. Its connections close with the application's lifespan.
    """
    pipeline = Pipeline(
        settings,
        table,
        media_transport=media_transport,
        resolver=resolver,
        background=background,
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await pipeline.start()
        yield
        await pipeline.aclose()

    app = _FrontDoor(pipeline, title="EPD-Serve", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.pipeline = pipeline
    add_error_seam(app)
    _add_status_routes(app, pipeline)
    if settings.observed:
        _add_observing_routes(app, pipeline, metrics_text)
    return app


class _FrontDoor(FastAPI):
    """Requests to a model go past FastAPI's middlewares and routes, of which they need nothing: an exchange answers its
    errors itself. Everything else it serves as ever."""

    def __init__(self, pipeline: Pipeline, **more: Any) -> None:
        super().__init__(**more)
        self._pipeline = pipeline
        self._endpoints = {endpoint.value: endpoint for endpoint in Endpoint}
        for path in self._endpoints:  # for the answer to other methods
            self.router.routes.append(Route(path, self, methods=["POST"]))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            endpoint = self._endpoints.get(scope["path"])
            if endpoint is not None:
                await Exchange(self._pipeline, endpoint)(scope, receive, send)
                return
        await super().__call__(scope, receive, send)


def _add_status_routes(app: FastAPI, pipeline: Pipeline) -> None:
    settings, table = pipeline.settings, pipeline.table
    document = openapi_document(settings, status.own_version()["version"])

    def readiness() -> status.Readiness:
        return status.Readiness(settings, table, pipeline.drain, pipeline.background.down)

    @app.get("/live")
    async def live() -> Response:
        return JSONResponse({"status": "alive"})

    @app.get("/health")
    async def health(request: Request) -> Response:
        code, body = readiness().health()
        if (role := request.query_params.get("role")) is not None:
            pipeline.callers.tenant_of(request.headers)  # it tells of the status table
            if not settings.observed:
                raise NotFoundError("/health?role is answered by the admin listener.", param="role", code="unknown_url")
            if not pipeline.drain.announced:
                code, body = status.health_of(role, table)
        return JSONResponse(body, code)

    @app.get("/ready")
    async def ready(request: Request) -> Response:
        code, body = readiness().ready(request.query_params.get("kind"), everything="all" in request.query_params)
        return JSONResponse(body, code)

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        pipeline.callers.tenant_of(request.headers)
        return JSONResponse(status.models(settings))

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        pipeline.callers.tenant_of(request.headers)
        return JSONResponse(status.model(settings, name))

    @app.get("/openapi.json")
    async def openapi(request: Request) -> Response:
        pipeline.callers.tenant_of(request.headers)
        return JSONResponse(document)

    @app.get("/version")
    async def version(request: Request) -> Response:
        pipeline.callers.tenant_of(request.headers)
        return JSONResponse(status.own_version())


def _add_observing_routes(
    app: FastAPI, pipeline: Pipeline, metrics_text: Callable[[Pipeline], Awaitable[bytes]] | None
) -> None:
    """What is on the admin listener where there is one. With API keys it wants one of them."""

    @app.get("/instances")
    async def instances(request: Request) -> Response:
        pipeline.callers.tenant_of(request.headers)
        return JSONResponse(status.instances(pipeline.table, pipeline.circuits))

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        pipeline.callers.tenant_of(request.headers)
        text = pipeline.metrics.text() if metrics_text is None else await metrics_text(pipeline)
        return PlainTextResponse(text, media_type=CONTENT_TYPE_LATEST)


def add_error_seam(app: FastAPI) -> None:
    """Whatever a route raises is answered in OpenAI's shape."""

    def answer(error: EpdError) -> Response:
        return JSONResponse(error_body(error), error.status, error_headers(error))

    @app.exception_handler(EpdError)
    async def named(_: Request, error: Exception) -> Response:
        assert isinstance(error, EpdError), "registered for EpdError"
        return answer(error)

    @app.exception_handler(RequestValidationError)
    async def wrong(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError), "registered for it"
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"] if part != "body")
        return answer(RequestError(f"{field or 'body'}: {first['msg']}", param=field or None))

    @app.exception_handler(HTTPException)
    async def routing(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), "registered for HTTPException"
        where = f"{request.method} {request.url.path}"
        if error.status_code == 404:
            return answer(unserved(request.url.path) or NotFoundError(f"There is no {where}.", code="unknown_url"))
        refusal = RequestError(f"{where}: {error.detail}", code="method_not_allowed")
        refusal.status = error.status_code
        return JSONResponse(error_body(refusal), error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def unexpected(_: Request, __: Exception) -> Response:
        # Starlette raises it again after this answer, and the server logs the traceback once.
        error = internal_error()
        return JSONResponse(error_body(error), error.status, {"connection": "close"})
