"""ZMQ sockets as stages use them: one context per process, seconds instead of milliseconds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import zmq

Socket = zmq.Socket[bytes]


def open_socket(kind: int, *, linger_s: float = 0.0) -> Socket:
    """A socket of the process's context. `linger_s`: how long close keeps trying to deliver."""
    opened: Socket = zmq.Context.instance().socket(kind)
    opened.setsockopt(zmq.LINGER, milliseconds(linger_s))
    opened.setsockopt(zmq.RECONNECT_IVL, 50)
    # A machine that loses power closes nothing: the kernel finds out for us, and ZMQ connects again. Idle links count.
    for option, value in ((zmq.TCP_KEEPALIVE, 1), (zmq.TCP_KEEPALIVE_IDLE, 10), (zmq.TCP_KEEPALIVE_INTVL, 5)):
        opened.setsockopt(option, value)
    opened.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    return opened


def milliseconds(seconds: float) -> int:
    return int(seconds * 1000)


def readable(socket: Socket, timeout_s: float = 0.0) -> bool:
    """Whether a message is here, or comes within `timeout_s`."""
    return bool(socket.poll(milliseconds(timeout_s)))


class Following:
    """Which addresses a socket is connected to, as those come and go. Belongs to the socket's thread."""

    def __init__(self, socket: zmq.Socket[Any]) -> None:
        self._socket = socket
        self._followed: frozenset[str] = frozenset()

    def follow(self, endpoints: Iterable[str]) -> None:
        """From now on these, and nobody else: ZMQ would try for ever to connect again to one that has left."""
        wanted = frozenset(endpoints)
        for endpoint in self._followed - wanted:
            self._socket.disconnect(endpoint)
        for endpoint in wanted - self._followed:
            self._socket.connect(endpoint)
        self._followed = wanted
