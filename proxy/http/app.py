"""The clients' port: its routes, what they say of themselves in the OpenAPI document, and the error seam. Everything
else is in the parts that `Pipeline` puts together."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal

import httpx
from fastapi import APIRouter, Depends, FastAPI, Header, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, Response
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from epd_serve import __version__
from epd_serve.errors import EpdError, NotFoundError, RequestError
from proxy import strict_json
from proxy.background import Background
from proxy.config.settings import ProxySettings
from proxy.errors import error_body, error_headers, internal_error
from proxy.http import status
from proxy.http.exchange import Exchange
from proxy.http.message_form import error_of
from proxy.http.openapi import (
    ANSWERS,
    MODEL_ERRORS,
    NOT_FOUND,
    OPERATIONS,
    answers,
    content,
    reference,
    schemas,
    unserved,
)
from proxy.media.fetch import Resolver, resolve
from proxy.pipeline import Pipeline
from proxy.registry.table import InstanceTable
from proxy.request.parse import Endpoint

NO = "It is not, or the server is coming to an end."


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
    (`proxy/http/admin.py`). With API keys all but the probes wants one of them.

    The pipeline is at `app.state.pipeline`. Its connections close with the application's lifespan.
    """
    pipeline = Pipeline(
        settings,
        table,
        media_transport=media_transport,
        resolver=resolver,
        background=background,
    )

    async def check_key(request: Request) -> None:  # in no thread of its own
        pipeline.callers.tenant_of(request.headers)

    async def counted() -> bytes:
        return pipeline.metrics.text() if metrics_text is None else await metrics_text(pipeline)

    app = _FrontDoor(pipeline)
    keyed, key_errors = APIRouter(dependencies=[Depends(check_key)]), dict[int, str]()
    if settings.api_keys is not None:
        keyed.dependencies.append(Depends(HTTPBearer(scheme_name="key", auto_error=False)))  # for the document
        key_errors = {401: "No API key, or not one of ours."}
        keyed.responses = answers(key_errors)
    _add_model_routes(keyed, key_errors)
    _add_own_routes(keyed, app)
    if settings.observed:
        keyed.include_router(observing_routes(lambda: status.instances(table, pipeline.circuits), counted))
    app.include_router(keyed)
    _add_probes(app, pipeline, key_errors)
    return app


class _FrontDoor(FastAPI):
    """Requests to a model go past FastAPI's middlewares and routes, of which they need nothing: an exchange answers its
    errors itself. Everything else it serves as ever."""

    def __init__(self, pipeline: Pipeline) -> None:
        @asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            await pipeline.start()
            yield
            await pipeline.aclose()

        super().__init__(title="EPD-Serve", version=__version__, lifespan=lifespan, **WITHOUT_PAGES)
        add_error_seam(self)
        self.state.pipeline = self.pipeline = pipeline
        self._exchanges = {endpoint.value: Exchange(pipeline, endpoint) for endpoint in Endpoint}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            exchange = self._exchanges.get(scope["path"])
            if exchange is not None:
                return await exchange(scope, receive, send)
        await super().__call__(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        """FastAPI's own document of the routes, with what they refer to. No parameter is refused for its form."""
        if self.openapi_schema is None:
            document = super().openapi()
            for operation in (one for path in document["paths"].values() for one in path.values()):
                if operation["responses"].get("422", {}).get("description") == "Validation Error":
                    del operation["responses"]["422"]
            document.setdefault("components", {})["schemas"] = schemas(self.pipeline.settings)
        return super().openapi()


WITHOUT_PAGES: dict[str, Any] = {"docs_url": None, "redoc_url": None, "openapi_url": None}
"""FastAPI serves pages of a document to everybody, with scripts from elsewhere."""


def json_answer(body: object, code: int = 200) -> Response:
    return Response(strict_json.encode(body), code, media_type="application/json")


def _add_model_routes(keyed: APIRouter, key_errors: Mapping[int, str]) -> None:
    """What the document says of requests to a model, and where other methods than POST are refused."""

    async def exchange(
        x_request_id: Annotated[
            str,
            Header(
                description="The client's name for the request, which the answer carries in the same header: up to 128 "
                "letters, digits and `._:/+=-`. Without one, or with another kind, the answer carries a name of the "
                "server's."
            ),
        ] = "",
        x_epd_explain: Annotated[
            Literal["0", "1"],
            Header(
                description="`1`: tell path, instances and moments of the request in `x-epd-*` headers of the answer, "
                "where the server is to (`--proxy explain=true`)."
            ),
        ] = "0",
    ) -> Response:
        raise AssertionError("requests to a model go past the routes")

    for endpoint, (operation, body) in OPERATIONS.items():
        answer = content({"type": "object"})
        if endpoint.generates:
            answer["text/event-stream"] = {"schema": reference("StreamEvent")}
        error = "AnthropicError" if endpoint.is_anthropic else "Error"
        summary = ANSWERS.get(endpoint, "The model's answer.")
        errors = answers({**key_errors, **MODEL_ERRORS}, error)
        keyed.post(
            endpoint.value,
            operation_id=operation,
            summary=summary,
            responses={200: {"description": summary, "content": answer}, **errors},
            openapi_extra={"requestBody": {"required": True, "content": content(reference(body))}},
        )(exchange)


def _add_own_routes(keyed: APIRouter, app: _FrontDoor) -> None:
    """What the server says of itself."""
    settings = app.pipeline.settings

    @keyed.get("/v1/models", operation_id="listModels", responses=answers({200: "OK"}, "Models"))
    async def models() -> Response:
        """Models of this server."""
        return json_answer(status.models(settings))

    @keyed.get(
        "/v1/models/{name:path}",
        operation_id="retrieveModel",
        responses=answers({200: "OK"}, "ModelCard") | answers({404: NOT_FOUND}),
    )
    async def model(name: Annotated[str, Path(json_schema_extra={"minLength": 1})]) -> Response:
        """One model."""
        return json_answer(status.model(settings, name))

    @keyed.get("/version", operation_id="getVersion", responses=answers({200: "OK"}, "Version"))
    async def version() -> Response:
        """Version of the proxy."""
        return json_answer(status.Version(__version__))

    @keyed.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        return json_answer(app.openapi())


def _add_probes(app: FastAPI, pipeline: Pipeline, key_errors: Mapping[int, str]) -> None:
    """What is open to all, but for what tells of the status table."""
    settings, table = pipeline.settings, pipeline.table

    def readiness() -> status.Readiness:
        return status.Readiness(settings, table, pipeline.drain, pipeline.background.down)

    @app.get("/live", operation_id="getLive", responses=answers({200: "OK"}, "Live"))
    async def live() -> Response:
        """Answers while the process does."""
        return json_answer(status.Live())

    @app.get(
        "/health",
        operation_id="getHealth",
        responses=answers({200: "OK", 503: NO}, "Health") | answers({404: "No such role here.", **key_errors}),
    )
    async def health(
        request: Request,
        role: Annotated[
            str | None,
            Query(
                description="Ask for a role, by llm-d's word for it: `encode`, `prefill`, `decode`, `prefill-decode`, "
                "`encode-prefill`, `encode-prefill-decode`. Wants an API key, if there are keys; where there is an "
                "admin listener, that one answers it."
            ),
        ] = None,
    ) -> Response:
        """Whether any request is served, or an instance of a role is live."""
        code, body = readiness().health()
        if role is not None:
            pipeline.callers.tenant_of(request.headers)  # it tells of the status table
            if not settings.observed:
                raise NotFoundError("/health?role is answered by the admin listener.", param="role", code="unknown_url")
            if not pipeline.drain.announced:
                code, body = status.health_of(role, table)
        return json_answer(body, code)

    @app.get(
        "/ready",
        operation_id="getReady",
        responses=answers({200: "OK", 503: NO}, "Ready") | answers({404: "No such kind here."}),
    )
    async def ready(
        kind: Annotated[
            str | None,
            Query(description="Ask for one kind: `text`, or a modality of the model (`image`, `audio`, `video`)."),
        ] = None,
        everything: Annotated[
            str | None,
            Query(
                alias="all",
                description="Ask for everything: all kinds, roles and instances, and all that feeds the status table.",
            ),
        ] = None,
    ) -> Response:
        """Which kinds of requests are served; 200 while any is, or all that was asked for."""
        code, body = readiness().ready(kind, everything=everything is not None)
        return json_answer(body, code)


def observing_routes(
    instances: Callable[[], dict[str, Any]], metrics_text: Callable[[], Awaitable[bytes]]
) -> APIRouter:
    """What is on the admin listener where there is one, else on the clients' port."""
    router = APIRouter()

    @router.get("/instances", operation_id="listInstances", responses=answers({200: "OK"}, "Instances"))
    async def table() -> Response:
        """The status table."""
        return json_answer(instances())

    @router.get("/metrics", operation_id="getMetrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Metrics in Prometheus' text format."""
        return PlainTextResponse(await metrics_text(), media_type=CONTENT_TYPE_LATEST)

    return router


def add_error_seam(app: FastAPI) -> None:
    """Whatever a route raises is answered in OpenAI's shape, or in Anthropic's where that is spoken."""

    async def answer(request: Request, error: Exception) -> Response:
        named = _named(request, error)
        body, headers = error_body(named), error_headers(named)
        if request.url.path in (Endpoint.MESSAGES, Endpoint.COUNT_TOKENS):
            body = error_of(body["error"], named.status)
        if isinstance(error, HTTPException):
            headers |= error.headers or {}
        return Response(strict_json.encode(body), named.status, headers, media_type="application/json")

    # Of what nobody named Starlette raises it again after the answer, and the server logs the traceback once.
    for kind in (EpdError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)


def _named(request: Request, error: Exception) -> EpdError:
    """What of ours it is that a route or the framework raises."""
    if isinstance(error, EpdError):
        return error
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"] if part != "body")
        return RequestError(f"{field or 'body'}: {first['msg']}", param=field or None)
    if not isinstance(error, HTTPException):
        return internal_error()
    where = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        return unserved(request.url.path) or NotFoundError(f"There is no {where}.", code="unknown_url")
    refusal = RequestError(f"{where}: {error.detail}", code="method_not_allowed")
    refusal.status = error.status_code
    return refusal
