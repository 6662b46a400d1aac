"""A collector for tests: takes OTLP over HTTP, and shows the spans that came."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Spanned:
    """One span. `kind`: as OTLP counts them, 2 is a server's, 3 a client's."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    begin_ns: int
    end_ns: int
    failed: bool
    attributes: dict[str, Any]
    events: list[str]


@dataclass
class Collector:
    """`refuses`: it answers 400 to everything. `answers`: until it is set, nothing is taken."""

    port: int
    refuses: bool = False
    answers: threading.Event = field(default_factory=threading.Event)
    spans: list[Spanned] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1/traces"

    def named(self, name: str) -> list[Spanned]:
        return [one for one in self.spans if one.name == name]

    def take(self, body: bytes) -> None:
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = _plain(group.resource.attributes)["service.name"]
            for span in (one for scope in group.scope_spans for one in scope.spans):
                ids = (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex())
                times = (span.start_time_unix_nano, span.end_time_unix_nano)
                events = [event.name for event in span.events]
                more = (span.status.code == 2, _plain(span.attributes), events)
                self.spans.append(Spanned(service, span.name, *ids, span.kind, *times, *more))


@contextlib.contextmanager
def collector(*, refuses: bool = False) -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces" and self.headers["content-type"] == "application/x-protobuf"
            one.answers.wait()
            if not one.refuses:
                one.take(body)
            self.send_response(400 if one.refuses else 200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Nowhere."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        one = Collector(server.server_address[1], refuses)
        one.answers.set()
        serving = threading.Thread(target=server.serve_forever, args=(0.02,))
        serving.start()
        try:
            yield one
        finally:
            one.answers.set()  # the server waits for those it is answering
            server.shutdown()
            serving.join()


def _plain(attributes: Any) -> dict[str, Any]:
    def value(one: Any) -> Any:
        kind = one.WhichOneof("value")
        return [value(each) for each in one.array_value.values] if kind == "array_value" else getattr(one, kind)

    return {one.key: value(one.value) for one in attributes}
