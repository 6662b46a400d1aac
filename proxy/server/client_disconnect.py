"""When a client leaves before it has its answer: by a word of our server, or by listening where there is another one.

ASGI lets an application learn of it only by waiting for messages, which takes a task per request. Our server's protocol
(`proxy/server/http_protocol.py`) knows when a connection is lost and says so to the request that is under way on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Receive, Scope

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
