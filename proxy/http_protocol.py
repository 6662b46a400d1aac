"""uvicorn's HTTP protocol with what it lacks: a bound on heads, and a word to a request whose client has left.

A bound on what it collects before a request's head, or a trailer, is complete: httptools has none, it joins what has
come of a header with every read, so that a client without any key could fill the memory with one endless line, and stop
the event loop for seconds by copying it again and again. The word is `proxy/departure.py`'s.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from proxy.departure import EXTENSION, Departure

MAX_HEAD_BYTES = 64 << 10


class FrontProtocol(HttpToolsProtocol):
    """Answers 400 and closes the connection beyond `MAX_HEAD_BYTES`."""

    _pending_bytes = 0
    """Received since anything of a message was complete."""

    _departure: Departure

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        self._departure = Departure(self.flow.resume_reading)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._departure.lost()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {EXTENSION: self._departure}  # type: ignore[dict-item]  # one of ours

    def data_received(self, data: bytes) -> None:
        self._pending_bytes += len(data)
        super().data_received(data)
        if self._pending_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The head of a request is larger than {MAX_HEAD_BYTES:,} bytes.")

    def on_headers_complete(self) -> None:
        self._pending_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._pending_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._pending_bytes = 0
        super().on_message_complete()
