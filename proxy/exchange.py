"""One exchange with one client, from its body to exactly one of: response, error, cancellation.

An ASGI response class, because only there are `receive` and `send` both at hand: one task works, another listens for
the client leaving and cancels the work, which closes every stage connection.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack
from uuid import uuid4

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from epd_serve.errors import EpdError, PayloadTooLargeError
from proxy.auth import caller_of
from proxy.errors import error_body, error_event, error_headers
from proxy.explain import Explanation, is_asked_for
from proxy.metrics import CANCELLED
from proxy.pipeline import Pipeline
from proxy.request import Endpoint
from proxy.sink import ClientSink
from proxy.stage_client import deadline

logger = logging.getLogger(__name__)
RECANCEL_S = 0.5


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
        sink = ClientSink(send, {"x-request-id": self._id}, explanation.headers)
        outcome = "500"
        self._pipeline.trace.stamp(self._id, "arrived")
        try:
            with metrics.in_flight.track_inprogress():
                outcome = await self._serve(headers, receive, sink, explanation)
        except asyncio.CancelledError:
            outcome = CANCELLED
            raise
        finally:
            metrics.requests.labels(self._endpoint.value, outcome).inc()
            self._pipeline.trace.stamp(self._id, "done", outcome=outcome)

    async def _serve(self, headers: Headers, receive: Receive, sink: ClientSink, explanation: Explanation) -> str:
        """Work until the end or until the client leaves. Returns how it ended, for the metrics."""
        with ExitStack() as held:
            try:
                caller = caller_of(headers, self._pipeline.settings)
                held.enter_context(self._pipeline.key_gate.admitted(caller.account))
                self._pipeline.check_admission()
                raw = await self._read(headers, receive)
            except ClientLeft:
                return CANCELLED
            except EpdError as error:
                return await self._answer_error(error, sink)
            explanation.stamp("received")
            async with asyncio.TaskGroup() as group:
                work = group.create_task(self._work(raw, caller.tenant, sink, explanation))
                watch = group.create_task(self._watch(receive, work, sink))
                await asyncio.wait([work])
                watch.cancel()
            return CANCELLED if work.cancelled() else work.result()

    async def _work(self, raw: bytes, tenant: str, sink: ClientSink, explanation: Explanation) -> str:
        try:
            async with deadline(self._pipeline.settings.timeouts.total_s, "the request"):
                await self._pipeline.run(self._id, self._endpoint, raw, tenant, sink, explanation)
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
            await sink.write(error_event(error))
        return "broken"

    async def _read(self, headers: Headers, receive: Receive) -> bytes:
        limit = self._pipeline.settings.max_body_bytes
        refusal = PayloadTooLargeError(f"The request body is larger than {limit:,} bytes.", code="body_too_large")
        announced = headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > limit:
            raise refusal
        body = bytearray()
        async with deadline(self._pipeline.settings.timeouts.total_s, "the request body"):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientLeft
                body += message.get("body", b"")
                if len(body) > limit:
                    raise refusal
                if not message.get("more_body", False):
                    return bytes(body)

    async def _watch(self, receive: Receive, work: asyncio.Task[str], sink: ClientSink) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        if not sink.finished:
            logger.info("request %s: the client left", self._id)
        # More than once: Python 3.11's TaskGroup loses a cancellation that meets a failing child.
        while not sink.finished and not work.done():
            work.cancel()
            await asyncio.wait([work], timeout=RECANCEL_S)
