"""Ends connections whose client takes nothing of what waits for it, and so sets free what they hold.

Nothing else does. A closed connection stays until its client has taken the rest, however the request ended; one whose
request is under way keeps its place with the stages meanwhile, up to the deadline of the whole request. Leaves to
uvicorn what the end of a connection means: a request on it is cancelled as if the client had left.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Iterable
from typing import Protocol

logger = logging.getLogger(__name__)
STALL_S = 60.0
LOOKS = 12
"""Within that time: so often a client that takes a little has to be met with just as much left as before."""

AT_ONCE = struct.pack("ii", 1, 0)
"""SO_LINGER: what the kernel holds of the connection goes with it."""


class Connection(Protocol):
    """What uvicorn keeps of one: its protocol."""

    @property
    def transport(self) -> asyncio.Transport: ...


class StalledClients:
    """Asked again and again (`look`), it remembers since when as much as now has waited on each connection."""

    def __init__(self, patience_s: float = STALL_S) -> None:
        self._patience_s = patience_s
        self._since: dict[Connection, tuple[int, float]] = {}
        self._look_at = 0.0

    def look(self, connections: Iterable[Connection], now: float) -> None:
        """Abort those of which nothing was taken for `patience_s`. Cheap where it is not time for that yet."""
        if now < self._look_at:
            return
        self._look_at = now + self._patience_s / LOOKS
        since = {}
        for one in list(connections):
            waiting = one.transport.get_write_buffer_size()
            if not waiting:
                continue
            before, begun = self._since.get(one, (0, now))
            since[one] = (waiting, begun if waiting == before else now)
            if now - since[one][1] >= self._patience_s:
                del since[one]
                self._abort(one.transport, waiting)
        self._since = since

    def _abort(self, transport: asyncio.Transport, waiting: int) -> None:
        logger.info("a client has taken nothing for %g s: %d bytes for it are dropped", self._patience_s, waiting)
        connected = transport.get_extra_info("socket")
        if connected is not None:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
        transport.abort()
