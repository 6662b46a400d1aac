"""One exchange with one client, from its body to exactly one of: response, error, cancellation.

An ASGI application for one request, because only there are `receive` and `send` both at hand. All of it runs in the
server's task for the request; the client's leaving and the end of its time cancel it (`proxy/request/cancel_scope.py`),
which closes every stage connection.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
import traceback
from contextlib import suppress
from enum import Enum, auto
from typing import NamedTuple, TypeVar

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from epd_serve.errors import DeadlineError, EpdError
from proxy.config.settings import ProxySettings
from proxy.errors import (
    DrainingError,
    error_body,
    error_event,
    error_headers,
    internal_error,
    response_error_event,
)
from proxy.http.body import ClientLeft, read_body
from proxy.http.message_form import MessageForm
from proxy.metrics import CANCELLED
from proxy.pipeline import Pipeline
from proxy.records.record import Record
from proxy.records.trace_context import TraceContext
from proxy.request.cancel_scope import CancelScope
from proxy.request.client_deadline import DeadlineLapsed, deadline_s
from proxy.request.client_sink import CHOICE, DELTA, ClientSink
from proxy.request.parse import Endpoint
from proxy.server.http_protocol import BODY_IS_HERE, DisconnectWatch

logger = logging.getLogger(__name__)
LAST_WORD_S = 1.0
"""How long a client may take to read the error that ends its request. One that reads nothing would be waited for as
long as it keeps its connection."""
EXPLAIN = "x-epd-explain"
CLIENT_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
T = TypeVar("T")


def client_request_id(headers: Headers) -> str | None:
    """The name that the client gives its request: it gets it back, and the trace has it. Stages know the request by a
    name of ours, since clients may give one name to many."""
    request_id = headers.get("x-request-id", "")
    return request_id if CLIENT_ID.fullmatch(request_id) else None


def is_explained(headers: Headers) -> bool:
    """Whether the client wants to be told what becomes of its request. Anything but `1`, `true`, `yes` means no."""
    return headers.get(EXPLAIN, "").strip().lower() in ("1", "true", "yes")


class RequestHeaders(Headers):
    """Looked up by name in one step, where starlette goes over all of them for every question: each is asked for once,
    and most are not there. `get` gives the first of several."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope=scope)
        self._first = dict(reversed(self._list))

    def get(self, key: str, default: T = None) -> str | T:  # type: ignore[assignment]
        value = self._first.get(key.lower().encode("latin-1"))
        return default if value is None else value.decode("latin-1")

    def getlist(self, key: str) -> list[str]:
        return super().getlist(key) if key.lower().encode("latin-1") in self._first else []


class _Why(Enum):
    """Why an exchange was cancelled."""

    LEFT = auto()
    LATE = auto()


class Exchange:
    """Serves one request to `endpoint` through `pipeline`."""

    def __init__(self, pipeline: Pipeline, endpoint: Endpoint) -> None:
        self._pipeline = pipeline
        self._settings = pipeline.settings
        self._endpoint = endpoint
        self._id = secrets.token_hex(16)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pipeline = self._pipeline
        headers = RequestHeaders(scope)
        named = client_request_id(headers)
        record = Record(self._id, self._endpoint.value, named or "")
        if self._settings.otlp_traces_endpoint:
            record.trace = TraceContext.of(headers.get("traceparent", ""), headers.get("tracestate", ""))
        explained = self._settings.explain and is_explained(headers)
        id_headers = ("x-request-id", "request-id") if self._endpoint.is_anthropic else ("x-request-id",)
        sink = ClientSink(
            send,
            dict.fromkeys(id_headers, named or self._id),
            record.headers if explained else dict,
            gap_limit_s=self._settings.slo.limits_s[1],
            content=DELTA if self._endpoint is Endpoint.RESPONSES else CHOICE,
            form=MessageForm() if self._endpoint.is_anthropic else None,
        )
        outcome = "500"
        pipeline.trace.stamp(self._id, "arrived", **({"client_id": named} if named else {}))
        pipeline.records.begin(record)
        try:
            with pipeline.drain:
                try:
                    outcome = await self._serve(scope, headers, receive, sink, record)
                except EpdError as error:
                    outcome = await self._answer_error(error, sink, record)
        except DrainingError as error:
            pipeline.metrics.refused.labels("draining").inc()
            outcome = await self._answer_error(error, sink, record)
        except asyncio.CancelledError:
            outcome = CANCELLED
            raise
        except Exception:
            answer = internal_error()
            record.ends_in(answer)
            if not sink.committed:
                await sink.respond_json(answer.status, error_body(answer), {"connection": "close"})
            raise  # the server logs the traceback
        finally:
            pipeline.trace.stamp(self._id, "done", outcome=outcome)
            record.outcome, record.status, record.bytes_out = outcome, sink.status, sink.bytes_sent
            record.events_sent, record.gaps, record.gaps_within = sink.events_sent, sink.gaps.count, sink.gaps.within
            record.gap_limit_s = sink.gaps.limit_s
            pipeline.records.end(record, sink.last)

    async def _serve(self, scope: Scope, headers: Headers, receive: Receive, sink: ClientSink, record: Record) -> str:
        """Read the body and work, until the client leaves or there is no more time. Returns how it ended, for the
        metrics. Raises EpdError: what to answer instead."""
        begun = time.monotonic()  # the event loop's clock, too
        caller = self._pipeline.callers.caller_of(headers)
        record.tenant = caller.tenant
        limit = _limit(headers, self._settings)
        cancel_scope: CancelScope[_Why] = CancelScope()
        admitted, memory = self._pipeline.admitted(caller), self._pipeline.memory.request(caller.account)
        with admitted, memory as held, cancel_scope:
            what = "the request body"
            cancel_scope.cancel_at(begun + limit.s, _Why.LATE)
            try:
                is_here = BODY_IS_HERE in scope.get("extensions", ())
                arriving = self._pipeline.arriving
                raw = await read_body(headers, receive, held, arriving, self._settings, is_here=is_here)
            except ClientLeft:
                return CANCELLED
            what = "the request"
            record.bytes_in = len(raw)
            record.took("received", begun)
            self._pipeline.trace.stamp(self._id, "received")

            def left() -> None:
                if not sink.finished:
                    logger.info("request %s: the client left", self._id)
                    record.note("client_left")
                    cancel_scope.cancel(_Why.LEFT)

            until = begun + limit.s if limit.clients else None
            with DisconnectWatch(scope, receive, left):
                try:
                    await self._pipeline.run(record, self._endpoint, raw, caller, held, sink, until=until)
                except EpdError as error:
                    return await self._answer_error(error, sink, record)
            return str(sink.status)
        if cancel_scope.reason is _Why.LEFT or sink.finished:
            return CANCELLED
        if limit.clients:
            self._pipeline.metrics.deadlines_lapsed.inc()
        raise limit.error(what)

    async def _answer_error(self, error: EpdError, sink: ClientSink, record: Record) -> str:
        """The error as JSON, or, once the stream has begun, as one event after which the connection is aborted:
        returning with the response unfinished makes the server close it."""
        _let_go(error)
        record.ends_in(error)
        if error.status >= 500:
            logger.warning("request %s ended with %d: %s", self._id, error.status, error.message)
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORD_S):
                if not sink.committed:
                    await sink.respond_json(error.status, error_body(error), error_headers(error))
                    return str(error.status)
                if not sink.finished:
                    responses = self._endpoint is Endpoint.RESPONSES
                    await sink.write(response_error_event(error) if responses else error_event(error))
        return "broken"


def _let_go(error: BaseException | None) -> None:
    """Free what the frames that raised `error` held: 32 MiB of media may be among it, and tasks that failed in a group
    are in a cycle with them, which nobody looks for before the next full collection."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


class _Limit(NamedTuple):
    """How long an exchange may take. `clients`: the client said so, not the operator."""

    s: float
    clients: bool

    def error(self, what: str) -> DeadlineError:
        kind = DeadlineLapsed if self.clients else DeadlineError
        return kind(f"{what} took longer than {self.s:g} s")


def _limit(headers: Headers, settings: ProxySettings) -> _Limit:
    total_s, client_s = settings.timeouts.total_s, deadline_s(headers)
    return _Limit(total_s, False) if client_s is None or client_s > total_s else _Limit(client_s, True)
