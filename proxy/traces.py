"""OpenTelemetry: requests that have ended as spans, sent to a collector by OTLP over HTTP. Imported only where one is
named; while a request runs its calls carry a trace context (`proxy/records/record.py`), and no span is made.

A request is handed to the SDK's batch processor as one span: itself. What it waited for and each call of a stage are
made of its record in the processor's thread. What finds no room there, or no collector, is dropped and counted.
Headers, certificates, compression and timeouts are taken from the environment, as OpenTelemetry names them
(`OTEL_EXPORTER_OTLP_…`); `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` win over what is said here of this process.

Attributes follow OpenTelemetry's conventions for HTTP servers and for generative AI where these have a name, and begin
with `epd.` elsewhere. No content, no keys: they are made of the record, which has none.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from epd_serve import __version__
from proxy.records.record import CALLS, SPAN_NAMES, Record

HELD = 4096
"""Requests that wait for the processor's thread."""

AT_ONCE = 64
"""Requests whose spans go in one message: some hundred kilobytes."""

GATHER_S = 0.2
LAST_S = 2.0
"""How long the end waits for what is left."""

SCOPE = InstrumentationScope("epd-serve", __version__)
SAMPLED = TraceFlags(TraceFlags.SAMPLED)
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
}
FINE = (None, "ok", "cancelled")
"""Outcomes of calls that are nobody's failure: whoever was no longer needed is left."""

ATTRIBUTES = {
    "http.route": "endpoint",
    "url.path": "endpoint",
    "http.request.body.size": "bytes_in",
    "http.response.body.size": "bytes_out",
    "error.type": "code",
    "gen_ai.request.model": "model",
    "gen_ai.request.stream": "stream",
    "gen_ai.response.time_to_first_chunk": "first_byte_s",
    "gen_ai.usage.input_tokens": "prompt_tokens",
    "gen_ai.usage.output_tokens": "completion_tokens",
    "gen_ai.usage.cache_read.input_tokens": "cached_tokens",
    "epd.request.id": "id",
    "epd.request.client_id": "client_id",
    "epd.tenant": "tenant",
    "epd.outcome": "outcome",
    "epd.path": "path",
    "epd.encode": "encode",
    "epd.prefill": "prefill",
    "epd.decode": "decode",
    "epd.attempts": "attempts",
}
"""Of a request's own span, by the field of the record that says it; left out where that is empty."""


class _Ended(NamedTuple):
    """A request, which the processor takes for the span of it: its trace is wanted."""

    record: Record
    context: SpanContext = SpanContext(1, 1, False, SAMPLED)


class SpanExport:
    """Takes ended requests, and is what its processor exports by: a `SpanExporter` of requests.

    Args:
        endpoint: URL of the collector's traces, such as `http://localhost:4318/v1/traces`.
        dropped: called with a number of requests whose spans were lost.
    """

    def __init__(self, endpoint: str, dropped: Callable[[int], object]) -> None:
        here = {"host.name": socket.gethostname(), "process.pid": os.getpid()}
        own = {"service.name": "epd-serve", "service.version": __version__, **here}
        self._resource = Resource(own).merge(OTELResourceDetector().detect())
        self._dropped = dropped
        self._given = self._taken = 0  # into the processor's queue and out of it, each written by one thread
        self._exporter = OTLPSpanExporter(endpoint=endpoint)
        self._processor = BatchSpanProcessor(
            self, max_queue_size=HELD, schedule_delay_millis=1000 * GATHER_S, max_export_batch_size=AT_ONCE
        )
        self.shutdown = self._exporter.shutdown  # which also ends a wait for the next try

    def ended(self, record: Record) -> None:
        """Send its spans, soon, if its trace is wanted."""
        if record.trace is None or not record.trace.sampled:
            return
        if self._given - self._taken >= HELD:
            self._dropped(1)
            return
        self._given += 1
        self._processor.on_end(_Ended(record))

    def close(self) -> None:
        """What has ended is sent, unless that takes too long."""
        ending = threading.Thread(target=self._processor.shutdown, daemon=True)
        ending.start()
        ending.join(LAST_S)
        if ending.is_alive():
            self.shutdown()
        self._dropped(self._given - self._taken)

    def export(self, requests: Sequence[_Ended]) -> SpanExportResult:
        """In the processor's thread."""
        self._taken += len(requests)
        sent = SpanExportResult.FAILURE
        try:
            made = [span for one in requests for span in spans_of(one.record, self._resource)]
            sent = self._exporter.export(made)  # which logs why not
        finally:
            if sent is not SpanExportResult.SUCCESS:
                self._dropped(len(requests))
        return sent


def spans_of(record: Record, resource: Resource) -> Iterator[ReadableSpan]:
    """Of a record with a trace; the request's own span first."""
    trace = record.trace
    assert trace is not None, "it belongs to a trace"

    def context(span_id: str, *, remote: bool = False) -> SpanContext:
        return SpanContext(int(trace.trace_id, 16), int(span_id, 16), remote, SAMPLED)

    def span(name: str, began_s: float, ended_s: float, failed: str | None, **more: Any) -> ReadableSpan:
        return ReadableSpan(
            name,
            resource=resource,
            status=Status(StatusCode.UNSET) if failed is None else Status(StatusCode.ERROR, failed),
            start_time=_ns(record, began_s),
            end_time=_ns(record, ended_s),
            instrumentation_scope=SCOPE,
            **more,
        )

    # By the conventions a request's own mistake is no error of the server.
    failed = record.message or record.code if record.status >= 500 or record.outcome == "broken" else None
    yield span(
        f"POST {record.endpoint}",
        0.0,
        record.total_s,
        failed,
        context=context(trace.span_id),
        parent=context(trace.parent_id, remote=True) if trace.parent_id else None,
        attributes=_request(record),
        events=list(_events(record)),
        kind=SpanKind.SERVER,
    )
    for at_s, name, details in record.events:
        if "s" in details:
            called, outcome = name in CALLS, details.get("outcome")
            title = SPAN_NAMES.get(name, name)
            yield span(
                f"{title} {details['stage']}" if called else title,
                at_s - details["s"],
                at_s,
                outcome if called and outcome not in FINE else None,
                context=context(details.get("span") or secrets.token_hex(8)),
                parent=context(trace.span_id),
                attributes=_details(details),
                kind=SpanKind.CLIENT if called else SpanKind.INTERNAL,
            )


def _request(record: Record) -> dict[str, Any]:
    said = {name: getattr(record, field) for name, field in ATTRIBUTES.items()}
    said |= {f"epd.items.{modality}": count for modality, count in record.media.items()}
    said |= {
        "http.request.method": "POST",
        "http.response.status_code": record.status or None,
        "gen_ai.operation.name": OPERATIONS.get(record.endpoint),
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.choice.count": record.answers if record.answers > 1 else None,
        "gen_ai.response.finish_reasons": [record.finish] if record.finish else None,
    }
    return {name: value for name, value in said.items() if value not in (None, "", [])}


def _events(record: Record) -> Iterator[Event]:
    for at_s, name, details in record.events:
        if "s" not in details:
            yield Event(name, _details(details), _ns(record, at_s))
    for one in record.choices:
        more = {"epd.work": one.work, "epd.policy": one.policy, "epd.chosen": tuple(one.chosen)}
        yield Event("choice", {**more, "epd.candidates": len(one.candidates)}, _ns(record, one.at_s))


def _details(details: Mapping[str, Any]) -> dict[str, Any]:
    plain = {f"epd.{name}": value for name, value in details.items() if name not in ("s", "span")}
    return {name: value for name, value in plain.items() if isinstance(value, str | bool | int | float)}


def _ns(record: Record, at_s: float) -> int:
    """Since the epoch. In one request all goes by the monotonic clock."""
    return round((record.began + at_s) * 1e9)
