"""uvicorn's HTTP protocol with what it lacks: bounds on heads, a word to a request whose client has left, and answers
whose head and beginning are one packet.

A bound on what it collects before a request's head, or a trailer, is complete: httptools has none, it joins what has
come of a header with every read, so that a client without any key could fill the memory with one endless line, and stop
the event loop for seconds by copying it again and again. Until when a head has to be complete,
`proxy/server/idle_clients.py` sees to, and what that needs to know is here.

ASGI lets an application learn that its client has left only by waiting for messages, which takes a task per request.
This protocol knows when a connection is lost and says so to the request that is under way on it; under another server
there is that task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from starlette.types import Receive, Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

EXTENSION = "epd.client_disconnect"
"""Where the `ClientDisconnect` of a connection is among the extensions of an ASGI scope."""

Left = Callable[[], None]


class ClientDisconnect:
    """Says when the client of one connection has left.

    Args:
        listen: lets the server read on, without which it does not notice. A large body stops the reading.
    """

    def __init__(self, listen: Callable[[], None]) -> None:
        self._listen = listen
        self._left: Left | None = None
        self._lost = False

    def watch(self, left: Left) -> None:
        """Call `left` from the event loop when the connection is lost, until `unwatch`. Soon where it is already.

        The request watched before it has been answered: whether its client leaves is of no interest any more.
        """
        self._left = left
        if self._lost:
            asyncio.get_running_loop().call_soon(self._say)
        else:
            self._listen()

    def unwatch(self, left: Left) -> None:
        """No more calls of `left`. The next request on the connection may be watched already, since this one's stages
        are waited for after its client has the answer."""
        if self._left is left:
            self._left = None

    def lost(self) -> None:
        """The connection is lost. The server's to call."""
        self._lost = True
        self._say()

    def _say(self) -> None:
        if self._left is not None:
            self._left()


class DisconnectWatch:
    """Calls `left` when the client leaves within the context, which begins once the whole body has been received."""

    def __init__(self, scope: Scope, receive: Receive, left: Left) -> None:
        self._disconnect: ClientDisconnect | None = scope.get("extensions", {}).get(EXTENSION)
        self._receive = receive
        self._left = left
        self._listening: asyncio.Task[None] | None = None

    def __enter__(self) -> None:
        if self._disconnect is not None:
            self._disconnect.watch(self._left)
        else:
            self._listening = asyncio.get_running_loop().create_task(_listen(self._receive, self._left))

    def __exit__(self, *_: object) -> None:
        if self._disconnect is not None:
            self._disconnect.unwatch(self._left)
        if self._listening is not None:
            self._listening.cancel()


async def _listen(receive: Receive, left: Left) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    left()


MAX_HEAD_BYTES = 64 << 10
BODY_IS_HERE = "epd.body_is_here"
"""Among the extensions of an ASGI scope once the whole body has come, which mostly is before the request is begun."""


class _OneWrite:
    """A transport on which the head of an answer leaves with what is written next, in the same turn of the event loop:
    uvicorn writes it apart, which costs a system call here and another wake-up at the client."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._head = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._head and data.startswith(b"HTTP/1.1 "):
            self._head = data
            self._loop.call_soon(self._flush)
            return
        if self._head:
            data, self._head = self._head + data, b""
        self._transport.write(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._head:
            self.write(b"")


class FrontProtocol(HttpToolsProtocol):
    """Answers 400 and closes the connection beyond `MAX_HEAD_BYTES`.

    Attributes:
        heads: of requests, complete ones so far.
    """

    heads = 0
    _pending_bytes = 0
    """Received since anything of a message was complete."""

    _disconnect: ClientDisconnect

    @property
    def idle(self) -> bool:
        """Nothing is asked of us: no request is complete that has not got its answer."""
        return self.cycle is None or (self.cycle.response_complete and not self.pipeline)

    @property
    def owes(self) -> bool:
        """The client has not ended what it began, a head or a body that was answered early, or has never begun."""
        return self.cycle is None or self._pending_bytes > 0 or self.cycle.more_body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(cast(asyncio.Transport, _OneWrite(transport)))
        self._disconnect = ClientDisconnect(self.flow.resume_reading)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._disconnect.lost()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {EXTENSION: self._disconnect}  # type: ignore[dict-item]  # one of ours

    def data_received(self, data: bytes) -> None:
        self._pending_bytes += len(data)
        super().data_received(data)
        if self._pending_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The head of a request is larger than {MAX_HEAD_BYTES:,} bytes.")

    def on_headers_complete(self) -> None:
        self._pending_bytes = 0
        self.heads += 1
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._pending_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._pending_bytes = 0
        self.scope["extensions"][BODY_IS_HERE] = {}
        super().on_message_complete()
