"""One exchange with one client, from its body to exactly one of: response, error, cancellation.

An ASGI application for one request, because only there are `receive` and `send` both at hand. All of it runs in the
server's task for the request; the client's leaving and the end of its time cancel it (`proxy/request/client.py`),
which closes every stage connection. Of the body it reads not more than may be, not more slowly, and of no account more
than its share.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
import traceback
from contextlib import nullcontext, suppress
from typing import TypeVar

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from epd_serve.errors import DeadlineError, EpdError, PayloadTooLargeError
from proxy.config.settings import ProxySettings
from proxy.context import RequestContext
from proxy.errors import (
    DrainingError,
    SlowBodyError,
    error_body,
    error_event,
    error_headers,
    internal_error,
    response_error_event,
)
from proxy.http.message_form import MessageForm
from proxy.metrics import CANCELLED
from proxy.pipeline import Pipeline
from proxy.records.record import Record, TraceContext
from proxy.request.client import (
    CHOICE,
    DELTA,
    SLO_TPOT,
    SLO_TTFT,
    CancelScope,
    ClientSink,
    DeadlineLapsed,
    deadline_s,
)
from proxy.request.parse import Endpoint
from proxy.server.http_protocol import BODY_IS_HERE, DisconnectWatch
from proxy.tenants import FairShare, MemoryReservation

logger = logging.getLogger(__name__)
LAST_WORD_S = 1.0
"""How long a client may take to read the error that ends its request. One that reads nothing would be waited for as
long as it keeps its connection."""
LEFT, LATE = "the client left", "its time is over"
"""Why an exchange was cancelled."""
EXPLAIN = "x-epd-explain"
CLIENT_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
T = TypeVar("T")
_NO_BOUND = nullcontext()


def client_request_id(headers: Headers) -> str | None:
    """The name that the client gives its request: it gets it back, and the trace has it. Stages know the request by a
    name of ours, since clients may give one name to many."""
    request_id = headers.get("x-request-id", "")
    return request_id if request_id and CLIENT_ID.fullmatch(request_id) else None


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


class Exchange:
    """Serves requests to `endpoint` through `pipeline`."""

    def __init__(self, pipeline: Pipeline, endpoint: Endpoint) -> None:
        self._pipeline = pipeline
        self._settings = pipeline.settings
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pipeline, headers = self._pipeline, RequestHeaders(scope)
        ctx = self._arrived(headers, send)
        sink, record, outcome = ctx.sink, ctx.record, "500"
        pipeline.records.begin(record)
        try:
            with pipeline.drain:
                try:
                    outcome = await self._serve(ctx, scope, headers, receive)
                except EpdError as error:
                    outcome = await _answer_error(ctx, error)
        except DrainingError as error:
            pipeline.metrics.refused.labels("draining").inc()
            outcome = await _answer_error(ctx, error)
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
            record.outcome, record.status, record.bytes_out = outcome, sink.status, sink.bytes_sent
            record.events_sent, record.gaps, record.gaps_within = sink.events_sent, sink.gaps.count, sink.gaps.within
            record.gap_limit_s = sink.gaps.limit_s
            pipeline.ended(ctx)

    def _arrived(self, headers: Headers, send: Send) -> RequestContext:
        settings, endpoint = self._settings, self._endpoint
        request_id = f"{random.getrandbits(128):032x}"  # one that nobody else has; a secret it is not
        named = client_request_id(headers)
        record = Record(request_id, endpoint.value, named or "")
        if settings.otlp_traces_endpoint:
            record.trace = TraceContext.of(headers.get("traceparent", ""), headers.get("tracestate", ""))
        sink = ClientSink(
            send,
            dict.fromkeys(("x-request-id", "request-id")[: 1 + endpoint.is_anthropic], named or request_id),
            record.headers if settings.explain and is_explained(headers) else dict,
            gap_limit_s=self._pipeline.slo_s[1],
            content=DELTA if endpoint is Endpoint.RESPONSES else CHOICE,
            form=MessageForm() if endpoint.is_anthropic else None,
        )
        return RequestContext(request_id, endpoint, sink, record, bool(settings.stage_priorities))

    async def _serve(self, ctx: RequestContext, scope: Scope, headers: Headers, receive: Receive) -> str:
        """Read the body and work, until the client leaves or there is no more time. Returns how it ended, for the
        metrics. Raises EpdError: what to answer instead."""
        pipeline, settings, record, sink = self._pipeline, self._settings, ctx.record, ctx.sink
        begun = time.monotonic()  # the event loop's clock, too
        ctx.caller = caller = pipeline.callers.caller_of(headers)
        record.tenant = caller.tenant
        ctx.asked_slo_s = deadline_s(headers, SLO_TTFT), deadline_s(headers, SLO_TPOT)
        limit_s, client_s = settings.timeouts.total_s, deadline_s(headers)
        if client_s is not None and client_s <= limit_s:
            limit_s, ctx.until = client_s, begun + client_s
        scope_of_work: CancelScope[str] = CancelScope()

        def left() -> None:
            if not sink.finished:
                logger.info("request %s: the client left", ctx.id)
                record.note("client_left")
                scope_of_work.cancel(LEFT)

        what = "the request body"
        with pipeline.admitted(caller), MemoryReservation(pipeline.memory, caller.account) as ctx.held, scope_of_work:
            scope_of_work.cancel_at(begun + limit_s, LATE)
            try:
                is_here = BODY_IS_HERE in scope.get("extensions", ())
                raw = await read_body(headers, receive, ctx.held, pipeline.arriving, settings, is_here=is_here)
            except ClientLeft:
                return CANCELLED
            what = "the request"
            record.bytes_in = len(raw)
            record.took("received", begun)
            with DisconnectWatch(scope, receive, left):
                try:
                    await pipeline.run(ctx, raw)
                except EpdError as error:
                    return await _answer_error(ctx, error)
            return str(sink.status)
        if scope_of_work.reason is LEFT or sink.finished:
            return CANCELLED
        if ctx.until is not None:
            pipeline.metrics.deadlines_lapsed.inc()
        kind = DeadlineError if ctx.until is None else DeadlineLapsed
        raise kind(f"{what} took longer than {limit_s:g} s")


async def _answer_error(ctx: RequestContext, error: EpdError) -> str:
    """The error as JSON, or, once the stream has begun, as one event after which the connection is aborted: returning
    with the response unfinished makes the server close it."""
    sink = ctx.sink
    _let_go(error)
    ctx.record.ends_in(error)
    if error.status >= 500:
        logger.warning("request %s ended with %d: %s", ctx.id, error.status, error.message)
    with suppress(TimeoutError):
        async with asyncio.timeout(LAST_WORD_S):
            if not sink.committed:
                await sink.respond_json(error.status, error_body(error), error_headers(error))
                return str(error.status)
            if not sink.finished:
                responses = ctx.endpoint is Endpoint.RESPONSES
                await sink.write(response_error_event(error) if responses else error_event(error))
    return "broken"


def _let_go(error: BaseException | None) -> None:
    """Free what the frames that raised `error` held: 32 MiB of media may be among it, and tasks that failed in a group
    are in a cycle with them, which nobody looks for before the next full collection."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


class ClientLeft(Exception):
    """The client closed its connection before its body was complete."""


async def read_body(
    headers: Headers,
    receive: Receive,
    held: MemoryReservation,
    arriving: FairShare,
    settings: ProxySettings,
    *,
    is_here: bool = False,
) -> bytearray:
    """The whole body, for as long as it comes fast enough.

    Args:
        held: has the bytes of it, from before they are kept. arriving: places for the bodies that are arriving, of
            which no account gets all.
        is_here: the server has all of it already, so that nobody is waited for.

    Raises:
        ClientLeft: before the end. SlowBodyError: 408. PayloadTooLargeError: 413. BusyError, KeyLimitError: no place.
    """
    announced = headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > settings.max_body_bytes:
        raise _too_large(settings.max_body_bytes)
    account = held.account
    arriving.take(account, 1)
    try:
        return await _read(receive, held, settings, is_here)
    finally:
        arriving.give_back(account, 1)


async def _read(receive: Receive, held: MemoryReservation, settings: ProxySettings, is_here: bool) -> bytearray:
    max_bytes, pace = settings.max_body_bytes, settings.body_pace
    begun, body = time.monotonic(), bytearray()  # the event loop's clock, too
    patience: CancelScope[str] | None = None if is_here else CancelScope()
    with patience or _NO_BOUND:
        while True:
            if patience is not None:
                earned_s = pace.grace_s + len(body) / pace.bytes_per_s
                patience.cancel_at(begun + min(earned_s, pace.most_s), "slow")
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            came = message.get("body", b"")
            if len(body) + len(came) > max_bytes:
                raise _too_large(max_bytes)
            held.take(len(came))
            body += came
            if not message.get("more_body", False):
                return body
    raise SlowBodyError(
        f"The request body came too slowly: {len(body):,} bytes in {time.monotonic() - begun:.0f} s; "
        f"{pace.bytes_per_s:,} bytes a second are asked for after {pace.grace_s:g} s, and all of it within "
        f"{pace.most_s:g} s."
    )


def _too_large(max_bytes: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"The request body is larger than {max_bytes:,} bytes.", code="body_too_large")
