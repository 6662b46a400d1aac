"""Ends connections whose client does nothing: takes nothing of what waits for it, or does not get to a request.

Nothing else does. A closed connection stays until its client has taken the rest, however the request ended; one whose
request is under way keeps its place with the stages meanwhile, up to the deadline of the whole request. uvicorn closes
idle connections after a request, and forgets to at the first byte of a next one; before the first request it waits for
ever. Leaves to uvicorn what the end of a connection means: a request on it is cancelled as if the client had left.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Protocol

logger = logging.getLogger(__name__)
LOOKS = 12
"""Within the shortest time: so often a client that does a little has to be met just as before."""

RESET_ON_CLOSE = struct.pack("ii", 1, 0)
"""SO_LINGER: what the kernel holds of the connection goes with it."""


@dataclass(frozen=True)
class IdleTimeouts:
    """
    Attributes:
        take_s: for a client that takes nothing of what waits for it.
        head_s: for one that has connected, or begun a request, until the request's head is there.
        keep_alive_s: between an answer and the next request.
    """

    take_s: float = 60.0
    head_s: float = 30.0
    keep_alive_s: float = 65.0


class Connection(Protocol):
    """What the server keeps of one: its protocol (`proxy/server/http_protocol.py`)."""

    heads: int

    @property
    def transport(self) -> asyncio.Transport: ...
    @property
    def idle(self) -> bool: ...
    @property
    def owes(self) -> bool: ...


def end_an_idle_one(connections: Iterable[Connection]) -> bool:
    """End a connection between two requests, to make room for another. Returns whether there was one; none while one
    of them is ending, which over TLS waits for its client."""
    resting = [one for one in connections if one.idle and not one.owes and not one.transport.get_write_buffer_size()]
    if not resting or any(one.transport.is_closing() for one in resting):
        return False
    resting[0].transport.close()
    return True


class IdleClients:
    """Asked again and again (`look`), it remembers since when each connection is just as it is now."""

    def __init__(self, idle_timeouts: IdleTimeouts) -> None:
        self._timeouts = idle_timeouts
        self._since: dict[Connection, tuple[Hashable, float]] = {}
        self._look_every_s = min(idle_timeouts.take_s, idle_timeouts.head_s, idle_timeouts.keep_alive_s) / LOOKS
        self._look_at = 0.0

    def look(self, connections: Iterable[Connection], now: float) -> None:
        """End those that were idle for too long. Cheap where it is not time for that yet."""
        if now < self._look_at:
            return
        self._look_at = now + self._look_every_s
        since: dict[Connection, tuple[Hashable, float]] = {}
        for one in list(connections):
            waiting = one.transport.get_write_buffer_size()
            if not waiting and not one.idle:
                continue
            state = (waiting, one.heads, one.owes)
            before, begun = self._since.get(one, (None, now))
            begun = begun if state == before else now
            if now - begun < self._limit_s(one, waiting):
                since[one] = (state, begun)
            elif waiting:
                self._abort(one.transport, waiting)
            else:
                one.transport.close()
        self._since = since

    def _limit_s(self, one: Connection, waiting_bytes: int) -> float:
        if waiting_bytes:
            return self._timeouts.take_s
        return self._timeouts.head_s if one.owes else self._timeouts.keep_alive_s

    def _abort(self, transport: asyncio.Transport, waiting_bytes: int) -> None:
        logger.info(
            "a client has taken nothing for %g s: %d bytes for it are dropped", self._timeouts.take_s, waiting_bytes
        )
        connected = transport.get_extra_info("socket")
        if connected is not None:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        transport.abort()
