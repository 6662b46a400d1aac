"""Sends the spans of requests that have ended to a collector, by OTLP over HTTP, from a thread of its own.

What finds no room in its queue, or no collector, is dropped and counted: no client waits for it. Headers, certificates,
compression and timeouts are taken from the environment, as OpenTelemetry names them (`OTEL_EXPORTER_OTLP_…`), and
`OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` win over what is said here of this process.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from epd_serve import __version__
from epd_serve.errors import ConfigError
from proxy.records.record import Record

logger = logging.getLogger(__name__)
HELD = 4096
"""Requests that wait for the thread."""

AT_ONCE = 64
"""Requests whose spans go in one message: some hundred kilobytes."""

GATHER_S = 0.2
LAST_S = 2.0
"""How long the end waits for what is left."""


def check_installed() -> None:
    """Raises ConfigError where OpenTelemetry is not installed."""
    try:
        there = all(map(importlib.util.find_spec, ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")))
    except ModuleNotFoundError:  # not even what they are parts of
        there = False
    if not there:
        message = "otlp_traces_endpoint needs OpenTelemetry, which is not installed: pip install 'epd-serve[otel]'"
        raise ConfigError(message, param="otlp_traces_endpoint")


class SpanExport:
    """Args:
        endpoint: URL of the collector's traces, such as `http://localhost:4318/v1/traces`.
        dropped: called with a number of requests whose spans were lost.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """

    def __init__(self, endpoint: str, dropped: Callable[[int], object]) -> None:
        check_installed()
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource

        here = {"host.name": socket.gethostname(), "process.pid": os.getpid()}
        own = {"service.name": "epd-serve", "service.version": __version__, **here}
        self._resource = Resource(own).merge(OTELResourceDetector().detect())
        self._exporter = OTLPSpanExporter(endpoint=endpoint)
        self._dropped = dropped
        self._waiting: deque[Record] = deque()
        self._wanted = threading.Event()
        self._ending = False
        self._thread = threading.Thread(target=self._send, name="span export", daemon=True)
        self._thread.start()

    def ended(self, record: Record) -> None:
        """Send its spans, soon, if its trace is wanted."""
        if record.trace is None or not record.trace.sampled:
            return
        if len(self._waiting) >= HELD:
            self._dropped(1)
            return
        self._waiting.append(record)
        self._wanted.set()

    def close(self) -> None:
        """What has ended is sent, unless that takes too long."""
        self._ending = True
        self._wanted.set()
        self._thread.join(LAST_S)
        lost = len(self._waiting)
        self._waiting.clear()
        self._dropped(lost)
        self._exporter.shutdown()  # which also ends a wait for the next try

    def _next(self) -> list[Record]:
        some: list[Record] = []
        with suppress(IndexError):  # `close` may have emptied it
            while len(some) < AT_ONCE:
                some.append(self._waiting.popleft())
        return some

    def _send(self) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        from proxy.traces.spans import spans_of

        while not (self._ending and not self._waiting):
            self._wanted.wait()
            if not self._ending:
                time.sleep(GATHER_S)  # a message for many
            self._wanted.clear()
            while self._waiting:
                some = self._next()
                try:
                    spans = [span for record in some for span in spans_of(record, self._resource)]
                    sent = self._exporter.export(spans) is SpanExportResult.SUCCESS  # which logs why not
                except Exception:
                    logger.exception("spans of %d requests cannot be made", len(some))
                    sent = False
                if not sent:
                    self._dropped(len(some))
