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
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum, auto

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from epd_serve.errors import DeadlineError, EpdError, PayloadTooLargeError
from proxy.config.settings import ProxySettings
from proxy.errors import (
    BusyError,
    DrainingError,
    SlowBodyError,
    error_body,
    error_event,
    error_headers,
    internal_error,
    response_error_event,
)
from proxy.http.request_headers import RequestHeaders
from proxy.metrics import CANCELLED
from proxy.pipeline import Pipeline
from proxy.request.cancel_scope import CancelScope
from proxy.request.client_deadline import DeadlineLapsed, deadline_s
from proxy.request.client_sink import ClientSink
from proxy.request.explanation import UNASKED, Explanation, is_asked_for
from proxy.request.parse import Endpoint
from proxy.server.client_disconnect import DisconnectWatch
from proxy.tenants.auth import caller_of
from proxy.tenants.fair_share import NoRoom, OverShare
from proxy.tenants.key_limits import KeyLimitError
from proxy.tenants.memory_budget import MemoryReservation

logger = logging.getLogger(__name__)
LAST_WORD_S = 1.0
"""How long a client may take to read the error that ends its request. One that reads nothing would be waited for as
long as it keeps its connection."""
CLIENT_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


def client_request_id(headers: Headers) -> str | None:
    """The name that the client gives its request: it gets it back, and the trace has it. Stages know the request by a
    name of ours, since clients may give one name to many."""
    request_id = headers.get("x-request-id", "")
    return request_id if CLIENT_ID.fullmatch(request_id) else None


class ClientLeft(Exception):
    """The client closed its connection before its body was complete."""


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
        explained = self._settings.explain and is_asked_for(headers)
        explanation = Explanation(self._id, wanted=True) if explained else UNASKED
        named = client_request_id(headers)
        sink = ClientSink(send, {"x-request-id": named or self._id}, explanation.headers)
        outcome = "500"
        pipeline.trace.stamp(self._id, "arrived", **({"client_id": named} if named else {}))
        try:
            with pipeline.drain:
                try:
                    outcome = await self._serve(scope, headers, receive, sink, explanation)
                except EpdError as error:
                    outcome = await self._answer_error(error, sink)
        except DrainingError as error:
            pipeline.metrics.refused.labels("draining").inc()
            outcome = await self._answer_error(error, sink)
        except asyncio.CancelledError:
            outcome = CANCELLED
            raise
        except Exception:
            if not sink.committed:
                answer = internal_error()
                await sink.respond_json(answer.status, error_body(answer), {"connection": "close"})
            raise  # the server logs the traceback
        finally:
            pipeline.metrics.requests.labels(self._endpoint.value, outcome).inc()
            pipeline.trace.stamp(self._id, "done", outcome=outcome)

    async def _serve(
        self, scope: Scope, headers: Headers, receive: Receive, sink: ClientSink, explanation: Explanation
    ) -> str:
        """Read the body and work, until the client leaves or there is no more time. Returns how it ended, for the
        metrics. Raises EpdError: what to answer instead."""
        begun = asyncio.get_running_loop().time()
        caller = caller_of(headers, self._settings)
        limit = _limit(headers, self._settings)
        cancel_scope: CancelScope[_Why] = CancelScope()
        admitted, memory = self._pipeline.admitted(caller.account), self._pipeline.memory.request(caller.account)
        with admitted, memory as held, cancel_scope:
            what = "the request body"
            cancel_scope.cancel_at(begun + limit.s, _Why.LATE)
            try:
                raw = await self._read(headers, receive, held)
            except ClientLeft:
                return CANCELLED
            what = "the request"
            explanation.stamp("received")

            def left() -> None:
                if not sink.finished:
                    logger.info("request %s: the client left", self._id)
                    cancel_scope.cancel(_Why.LEFT)

            until = begun + limit.s if limit.clients else None
            with DisconnectWatch(scope, receive, left):
                try:
                    await self._pipeline.run(
                        self._id, self._endpoint, raw, caller.tenant, held, sink, explanation, until=until
                    )
                except EpdError as error:
                    return await self._answer_error(error, sink)
            return str(sink.status)
        if cancel_scope.reason is _Why.LEFT or sink.finished:
            return CANCELLED
        if limit.clients:
            self._pipeline.metrics.deadlines_lapsed.inc()
        raise limit.error(what)

    async def _answer_error(self, error: EpdError, sink: ClientSink) -> str:
        """The error as JSON, or, once the stream has begun, as one event after which the connection is aborted:
        returning with the response unfinished makes the server close it."""
        _let_go(error)
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

    async def _read(self, headers: Headers, receive: Receive, held: MemoryReservation) -> bytearray:
        """The whole body, for as long as it comes fast enough. Raises SlowBodyError and the like."""
        max_bytes = self._settings.max_body_bytes
        announced = headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > max_bytes:
            raise _too_large(max_bytes)
        body = bytearray()
        pace, begun = self._settings.body_pace, asyncio.get_running_loop().time()
        with self._arriving(held.account):
            try:
                async with asyncio.timeout_at(begun + min(pace.grace_s, pace.most_s)) as patience:
                    while True:
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
                        earned_s = pace.grace_s + len(body) / pace.bytes_per_s
                        patience.reschedule(begun + min(earned_s, pace.most_s))
            except TimeoutError:
                raise SlowBodyError(
                    f"The request body came too slowly: {len(body):,} bytes in "
                    f"{asyncio.get_running_loop().time() - begun:.0f} s; {pace.bytes_per_s:,} bytes a second are asked "
                    f"for after {pace.grace_s:g} s, and all of it within {pace.most_s:g} s."
                ) from None

    @contextmanager
    def _arriving(self, account: str) -> Iterator[None]:
        """A place among the bodies that are arriving, of which no account gets all."""
        arriving = self._pipeline.arriving
        try:
            arriving.take(account, 1)
        except NoRoom:
            raise BusyError("as many request bodies are arriving as may; try again later", code="bodies_full") from None
        except OverShare:
            raise KeyLimitError(
                f"{arriving.held_by(account)} request bodies of this account are arriving, which is its share; "
                "try again later"
            ) from None
        try:
            yield
        finally:
            arriving.give_back(account, 1)


def _let_go(error: BaseException | None) -> None:
    """Free what the frames that raised `error` held: 32 MiB of media may be among it, and tasks that failed in a group
    are in a cycle with them, which nobody looks for before the next full collection."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def _too_large(max_bytes: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"The request body is larger than {max_bytes:,} bytes.", code="body_too_large")


@dataclass(frozen=True)
class _Limit:
    """How long an exchange may take. `clients`: the client said so, not the operator."""

    s: float
    clients: bool

    def error(self, what: str) -> DeadlineError:
        kind = DeadlineLapsed if self.clients else DeadlineError
        return kind(f"{what} took longer than {self.s:g} s")


def _limit(headers: Headers, settings: ProxySettings) -> _Limit:
    total_s, client_s = settings.timeouts.total_s, deadline_s(headers)
    return _Limit(total_s, False) if client_s is None or client_s > total_s else _Limit(client_s, True)
