"""One exchange with one client, from its body to exactly one of: response, error, cancellation.

An ASGI response class, because only there are `receive` and `send` both at hand: one task works, another listens for
the client leaving and cancels the work, which closes every stage connection.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Coroutine
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from epd_serve.errors import DeadlineError, EpdError, PayloadTooLargeError
from proxy.auth import caller_of
from proxy.client_deadline import DeadlineLapsed, deadline_s
from proxy.errors import DrainingError, error_body, error_event, error_headers, response_error_event
from proxy.explain import Explanation, is_asked_for
from proxy.metrics import CANCELLED
from proxy.pipeline import Pipeline
from proxy.request import Endpoint
from proxy.settings import ProxySettings
from proxy.sink import ClientSink

logger = logging.getLogger(__name__)
RECANCEL_S = 0.5
"""Python 3.11's TaskGroup loses a cancellation that meets a failing child, so it is repeated. Not sooner: another one
interrupts the closing of connections that is under way, and leaves them open."""
LAST_WORD_S = 1.0
"""How long a client may take to read the event that ends a broken stream. One that reads nothing would be waited for as
long as it keeps its connection."""
CLIENT_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


def client_request_id(headers: Headers) -> str | None:
    """The name that the client gives its request: it gets it back, and the trace has it. Stages know the request by a
    name of ours, since clients may give one name to many."""
    given = headers.get("x-request-id", "")
    return given if CLIENT_ID.fullmatch(given) else None


class ClientLeft(Exception):
    """The client closed its connection before its body was complete."""


class Exchange(Response):
    """Serves one request to `endpoint` through `pipeline`."""

    def __init__(self, pipeline: Pipeline, endpoint: Endpoint) -> None:
        self._pipeline = pipeline
        self._endpoint = endpoint
        self._id = uuid4().hex
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        metrics = self._pipeline.metrics
        headers = Headers(scope=scope)
        wanted = self._pipeline.settings.explain and is_asked_for(headers)
        explanation = Explanation(self._id, wanted=wanted)
        named = client_request_id(headers)
        sink = ClientSink(send, {"x-request-id": named or self._id}, explanation.headers)
        outcome = "500"
        self._pipeline.trace.stamp(self._id, "arrived", **({"client_id": named} if named else {}))
        try:
            with metrics.in_flight.track_inprogress(), self._pipeline.drain.exchange():
                outcome = await self._serve(headers, receive, sink, explanation)
        except DrainingError as error:
            metrics.refused.labels("draining").inc()
            outcome = await self._answer_error(error, sink)
        except asyncio.CancelledError:
            outcome = CANCELLED
            raise
        finally:
            metrics.requests.labels(self._endpoint.value, outcome).inc()
            self._pipeline.trace.stamp(self._id, "done", outcome=outcome)

    async def _serve(self, headers: Headers, receive: Receive, sink: ClientSink, explanation: Explanation) -> str:
        """Read the body and work. Returns how it ended, for the metrics."""
        begun = asyncio.get_running_loop().time()
        with ExitStack() as held:
            try:
                caller = caller_of(headers, self._pipeline.settings)
                limit = _limit(headers, self._pipeline.settings)
                held.enter_context(self._pipeline.key_gate.admitted(caller.account))
                held.enter_context(self._pipeline.admitted())
                raw = await self._read(headers, receive, limit)
            except ClientLeft:
                return CANCELLED
            except EpdError as error:
                return await self._answer_error(error, sink)
            explanation.stamp("received")
            until = begun + limit.s
            work = self._work(raw, caller.tenant, sink, explanation, until if limit.clients else None)
            return await self._bounded(work, receive, sink, limit, until)

    async def _bounded(
        self, coroutine: Coroutine[Any, Any, str], receive: Receive, sink: ClientSink, limit: _Limit, until: float
    ) -> str:
        """Work until the end, until the client leaves, or until there is no more time."""
        async with asyncio.TaskGroup() as group:
            work = group.create_task(coroutine)
            watch = group.create_task(self._watch(receive, work, sink))
            await asyncio.wait([work], timeout=max(0.0, until - asyncio.get_running_loop().time()))
            in_time = work.done()
            if not in_time:
                await _end(work)
            watch.cancel()
        if not work.cancelled():
            return work.result()
        if in_time or sink.finished:
            return CANCELLED
        if limit.clients:
            self._pipeline.metrics.deadlines_lapsed.inc()
        return await self._answer_error(limit.error("the request"), sink)

    async def _work(
        self, raw: bytes, tenant: str, sink: ClientSink, explanation: Explanation, until: float | None
    ) -> str:
        try:
            await self._pipeline.run(self._id, self._endpoint, raw, tenant, sink, explanation, until=until)
        except EpdError as error:
            return await self._answer_error(error, sink)
        return str(sink.status)

    async def _answer_error(self, error: EpdError, sink: ClientSink) -> str:
        """The error as JSON, or, once the stream has begun, as one event after which the connection is aborted:
        returning with the response unfinished makes the server close it."""
        if error.status >= 500:
            logger.warning("request %s ended with %d: %s", self._id, error.status, error.message)
        if not sink.committed:
            await sink.respond_json(error.status, error_body(error), error_headers(error))
            return str(error.status)
        if not sink.finished:
            responses = self._endpoint is Endpoint.RESPONSES
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORD_S):
                    await sink.write(response_error_event(error) if responses else error_event(error))
        return "broken"

    async def _read(self, headers: Headers, receive: Receive, limit: _Limit) -> bytes:
        max_bytes = self._pipeline.settings.max_body_bytes
        refusal = PayloadTooLargeError(f"The request body is larger than {max_bytes:,} bytes.", code="body_too_large")
        announced = headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > max_bytes:
            raise refusal
        body = bytearray()
        try:
            async with asyncio.timeout(limit.s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientLeft
                    body += message.get("body", b"")
                    if len(body) > max_bytes:
                        raise refusal
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise limit.error("the request body") from None

    async def _watch(self, receive: Receive, work: asyncio.Task[str], sink: ClientSink) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        if not sink.finished:
            logger.info("request %s: the client left", self._id)
            await _end(work)


async def _end(work: asyncio.Task[str]) -> None:
    """Cancel, and wait until it is over."""
    while not work.done():
        work.cancel()
        await asyncio.wait([work], timeout=RECANCEL_S)


@dataclass(frozen=True)
class _Limit:
    """How long an exchange may take. `clients`: the client said so, not the operator."""

    s: float
    clients: bool

    def error(self, what: str) -> DeadlineError:
        kind = DeadlineLapsed if self.clients else DeadlineError
        return kind(f"{what} took longer than {self.s:g} s")


def _limit(headers: Headers, settings: ProxySettings) -> _Limit:
    total_s, asked_s = settings.timeouts.total_s, deadline_s(headers)
    return _Limit(total_s, False) if asked_s is None or asked_s > total_s else _Limit(asked_s, True)
