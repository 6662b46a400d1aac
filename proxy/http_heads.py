"""uvicorn's HTTP protocol with a bound on what it collects before a request's head, or a trailer, is complete.

httptools has none: it joins what has come of a header with every read, so that a client without any key could fill the
memory with one endless line, and stop the event loop for seconds by copying it again and again.
"""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10


class BoundedHeads(HttpToolsProtocol):
    """Answers 400 and closes the connection beyond `MAX_HEAD_BYTES`."""

    _pending_bytes = 0
    """Received since anything of a message was complete."""

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
