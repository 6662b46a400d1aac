"""The spans of a request that has ended: itself, what it waited for, and each call of a stage. Pure.

Attributes follow OpenTelemetry's conventions for HTTP servers and for generative AI where these have a name, and begin
with `epd.` elsewhere. No content, no keys: they are made of the record, which has none.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from epd_serve import __version__
from proxy.records.record import CALLS, SPAN_NAMES, Record
from proxy.records.trace_context import TraceContext

SCOPE = InstrumentationScope("epd-serve", __version__)
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
}
FINE = ("ok", "cancelled")
"""Outcomes of calls that are nobody's failure: whoever was no longer needed is left."""

Attributes = dict[str, Any]


def spans_of(record: Record, resource: Resource) -> Iterator[ReadableSpan]:
    """Of a record with a trace; the request's own span first."""
    trace = record.trace
    assert trace is not None, "it belongs to a trace"
    yield ReadableSpan(
        f"POST {record.endpoint}",
        context=_context(trace, trace.span_id),
        parent=_context(trace, trace.parent_id, remote=True) if trace.parent_id else None,
        resource=resource,
        attributes=_request(record),
        events=list(_events(record)),
        kind=SpanKind.SERVER,
        status=_status(record),
        start_time=_ns(record, 0.0),
        end_time=_ns(record, record.total_s),
        instrumentation_scope=SCOPE,
    )
    for at_s, name, details in record.events:
        if "s" in details:
            called = name in CALLS
            failed = called and details.get("outcome") not in FINE
            yield ReadableSpan(
                f"{SPAN_NAMES.get(name, name)} {details['stage']}" if called else SPAN_NAMES.get(name, name),
                context=_context(trace, details.get("span") or secrets.token_hex(8)),
                parent=_context(trace, trace.span_id),
                resource=resource,
                attributes=_details(details),
                kind=SpanKind.CLIENT if called else SpanKind.INTERNAL,
                status=Status(StatusCode.ERROR, str(details.get("outcome"))) if failed else Status(StatusCode.UNSET),
                start_time=_ns(record, at_s - details["s"]),
                end_time=_ns(record, at_s),
                instrumentation_scope=SCOPE,
            )


def _request(record: Record) -> Attributes:
    tokens, cached = (record.prompt_tokens, record.completion_tokens), record.cached_tokens
    known = {
        "http.request.method": "POST",
        "http.route": record.endpoint,
        "url.path": record.endpoint,
        "http.response.status_code": record.status or None,
        "http.request.body.size": record.bytes_in,
        "http.response.body.size": record.bytes_out,
        "error.type": record.code or None,
        "gen_ai.operation.name": OPERATIONS.get(record.endpoint),
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": record.model or None,
        "gen_ai.request.stream": record.stream,
        "gen_ai.request.choice.count": record.answers if record.answers > 1 else None,
        "gen_ai.response.finish_reasons": (record.finish,) if record.finish else None,
        "gen_ai.response.time_to_first_chunk": record.first_byte_s,
        "gen_ai.usage.input_tokens": tokens[0],
        "gen_ai.usage.output_tokens": tokens[1],
        "gen_ai.usage.cache_read.input_tokens": cached,
        "epd.request.id": record.id,
        "epd.request.client_id": record.client_id or None,
        "epd.tenant": record.tenant or None,
        "epd.outcome": record.outcome,
        "epd.path": record.path or None,
        "epd.encode": tuple(record.encode) or None,
        "epd.prefill": record.prefill or None,
        "epd.decode": record.decode or None,
        "epd.attempts": record.attempts,
        **{f"epd.items.{modality}": count for modality, count in record.media.items()},
    }
    return {name: value for name, value in known.items() if value is not None}


def _events(record: Record) -> Iterator[Event]:
    for at_s, name, details in record.events:
        if "s" not in details:
            yield Event(name, _details(details), _ns(record, at_s))
    for one in record.choices:
        more = {"epd.work": one.work, "epd.policy": one.policy, "epd.chosen": tuple(one.chosen)}
        yield Event("choice", {**more, "epd.candidates": len(one.candidates)}, _ns(record, one.at_s))


def _details(details: Mapping[str, Any]) -> Attributes:
    plain = {f"epd.{name}": value for name, value in details.items() if name not in ("s", "span")}
    return {name: value for name, value in plain.items() if isinstance(value, str | bool | int | float)}


def _status(record: Record) -> Status:
    """By the conventions a request's own mistake is no error of the server."""
    if record.status >= 500 or record.outcome == "broken":
        return Status(StatusCode.ERROR, record.message or record.code)
    return Status(StatusCode.UNSET)


def _context(trace: TraceContext, span_id: str, *, remote: bool = False) -> SpanContext:
    return SpanContext(int(trace.trace_id, 16), int(span_id, 16), remote, TraceFlags(TraceFlags.SAMPLED))


def _ns(record: Record, at_s: float) -> int:
    """Since the epoch. In one request all goes by the monotonic clock."""
    return round((record.began + at_s) * 1e9)
