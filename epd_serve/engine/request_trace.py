"""Where a request is inside one stage, for `--trace-dir`: stamps from vLLM's plugin points, under the proxy's id of it.

    API server   received      the whole request is here                            ASGI middleware (`--middleware`)
                 decoded       a media item is pixels or samples now, since `t0`    media connector
                 handed_over   rendered, processed, tokenised, sent to the engine   vLLM's log of requests
                 answering     the first bytes of the answer have left              ASGI middleware
    EngineCore   queued        the scheduler has it, after the step that ran        scheduler class
                 scheduled     the first step begins that computes some of it
                 computed      the step with its first token has ended

Where nobody asked for a trace, none of it is in use.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from contextvars import ContextVar
from typing import Any

from epd_serve.engine.argv import WIRING_ENV
from epd_serve.engine.compat import media_connectors
from epd_serve.engine.ec.step import proxy_request_id
from epd_serve.trace import Trace
from epd_serve.wiring import StageWiring

HANDED_OVER = "Added request %s."
"""What `AsyncLLM` logs, with the request's id, once the engine has been sent a request (`--enable-log-requests`)."""
HANDING_OVER = "vllm.v1.engine.async_llm"
REQUEST_LOG = "vllm.entrypoints.serve.utils.request_logger"
CONNECTOR_ENV, CONNECTOR = "VLLM_MEDIA_CONNECTOR", "epd_traced"

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_request: ContextVar[str] = ContextVar("epd_traced_request", default="")


class RequestTrace:
    """ASGI middleware of a traced stage. Requests without an `x-request-id` leave no stamp."""

    def __init__(self, app: Callable[[_Scope, _Receive, _Send], Awaitable[None]]) -> None:
        self._app = app
        wiring = StageWiring.from_json(json.loads(os.environ[WIRING_ENV]))
        self._trace = Trace(wiring.trace_path, wiring.instance)
        logging.getLogger(HANDING_OVER).addFilter(self._handed_over)
        logging.getLogger(REQUEST_LOG).setLevel(logging.WARNING)  # switched on for that one line, not for its own
        trace_media_decoding(self._trace)

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        name = request_name(scope)
        if not name:
            await self._app(scope, receive, send)
            return
        _request.set(name)
        answering = False

        async def received() -> MutableMapping[str, Any]:
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body"):
                self._trace.stamp(name, "received")
            return message

        async def sent(message: MutableMapping[str, Any]) -> None:
            nonlocal answering
            await send(message)
            if message["type"] == "http.response.body" and message.get("body") and not answering:
                answering = True
                self._trace.stamp(name, "answering")

        await self._app(scope, received, sent)

    def _handed_over(self, record: logging.LogRecord) -> bool:
        if record.msg != HANDED_OVER or not isinstance(record.args, tuple):
            return True
        self._trace.stamp(proxy_request_id(str(record.args[0])), "handed_over")
        return False


def request_name(scope: _Scope) -> str:
    """The `x-request-id` of a POST, else ""."""
    if scope["type"] != "http" or scope.get("method") != "POST":
        return ""
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"), "")


class SchedulerTrace:
    """What the scheduler class stamps. Belongs to the scheduler's thread."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._without_token: set[str] = set()

    def queued(self, request: Any) -> None:
        self._trace.stamp(proxy_request_id(request.request_id), "queued")

    def scheduled(self, output: Any) -> None:
        """`output`: vLLM's `SchedulerOutput`."""
        self._without_token.difference_update(output.finished_req_ids)
        for new in output.scheduled_new_reqs:
            self._without_token.add(new.req_id)
            self._trace.stamp(proxy_request_id(new.req_id), "scheduled")

    def updated(self, outputs: Iterable[Any]) -> None:
        """`outputs`: vLLM's `EngineCoreOutputs` of one step."""
        if not self._without_token:
            return
        for one in (each for several in outputs for each in several.outputs):
            if one.request_id in self._without_token:
                self._without_token.discard(one.request_id)
                self._trace.stamp(proxy_request_id(one.request_id), "computed")


def trace_media_decoding(trace: Trace) -> None:
    """Have vLLM load media by its own connector, with a stamp per item. Nothing changes where the operator has named
    one. In the API server, whose settings are read anew at each request."""
    if CONNECTOR_ENV in os.environ:
        return
    registry, connector = media_connectors()

    class TracedMediaConnector(connector):  # type: ignore[misc, valid-type]
        async def load_from_url_async(self, *args: Any, **more: Any) -> Any:
            begun = time.monotonic()
            loaded = await super().load_from_url_async(*args, **more)
            if name := _request.get():
                trace.stamp(name, "decoded", t0=begun)
            return loaded

    registry.register(CONNECTOR)(TracedMediaConnector)
    os.environ[CONNECTOR_ENV] = CONNECTOR
