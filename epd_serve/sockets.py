"""ZMQ sockets as stages use them: one context per process, seconds instead of milliseconds, TCP for members only.

Within a machine sockets lie in the run directory, which nobody else can enter. Over TCP they speak CURVE, ZMQ's own
encryption (RFC 26): a client has to know the server's public key before it can say its first word, and a server whose
secret key is another one cannot answer it. Here all sockets of a deployment have one key pair, made from its key, and
the public half is published nowhere: so knowing it is being a member, either way, and nobody asks a list of clients
(ZAP). Whoever connects without it, or in plain, is dropped before a message of his is read, or one is sent to him.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import zmq
from zmq.utils import z85

from epd_serve.errors import ConfigError
from epd_serve.key_files import derived_key, read_key

Socket = zmq.Socket[bytes]

SUBSCRIBES = b"\1"
"""What begins the word of one who subscribes to an XPUB socket; the topic follows."""

_TCP = "tcp://"


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


def bind(socket: zmq.Socket[Any], address: str, key_file: str = "") -> None:
    """Have others connect here.

    Args:
        key_file: of the deployment's key, without which nothing is bound to a TCP port.

    Raises:
        ConfigError: a TCP port and no key that can be used. zmq.ZMQError: the address cannot be bound.
    """
    _guard(socket, address, key_file, serves=True)
    socket.bind(address)


def connect(socket: zmq.Socket[Any], address: str, key_file: str = "") -> None:
    """Connect, now or when somebody is there. Addresses of one socket may be of both kinds.

    Raises:
        ConfigError: a TCP port and no key that can be used. zmq.ZMQError: it is no address.
    """
    _guard(socket, address, key_file, serves=False)
    socket.connect(address)


def milliseconds(seconds: float) -> int:
    return int(seconds * 1000)


def readable(socket: Socket, timeout_s: float = 0.0) -> bool:
    """Whether a message is here, or comes within `timeout_s`."""
    return bool(socket.poll(milliseconds(timeout_s)))


class Following:
    """Which addresses a socket is connected to, as those come and go. Belongs to the socket's thread.

    Args:
        key_file: of the deployment's key, where addresses may be TCP ports.
    """

    def __init__(self, socket: zmq.Socket[Any], key_file: str = "") -> None:
        self._socket = socket
        self._key_file = key_file
        self._followed: frozenset[str] = frozenset()

    def follow(self, endpoints: Iterable[str]) -> None:
        """From now on these, and nobody else: ZMQ would try for ever to connect again to one that has left."""
        wanted = frozenset(endpoints)
        for endpoint in self._followed - wanted:
            self._socket.disconnect(endpoint)
        for endpoint in wanted - self._followed:
            connect(self._socket, endpoint, self._key_file)
        self._followed = wanted


def _guard(socket: zmq.Socket[Any], address: str, key_file: str, *, serves: bool) -> None:
    """Options hold for what is bound or connected next, not for what is already."""
    if socket.getsockopt(zmq.MECHANISM) != zmq.NULL:
        socket.setsockopt(zmq.CURVE_SERVER, 0)  # takes the mechanism back
    if not address.startswith(_TCP):
        return
    socket.setsockopt(zmq.IPV6, not _is_ipv4(address))
    if not key_file:
        raise ConfigError(f"{address}: a TCP port wants the deployment's key; give its file", param="key_file")
    public, secret = _key_pair(key_file)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    if serves:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
    else:
        socket.setsockopt(zmq.CURVE_SERVERKEY, public)


@lru_cache
def _key_pair(key_file: str) -> tuple[bytes, bytes]:
    """Public and secret key of every socket of the deployment. Raises ConfigError."""
    secret = z85.encode(derived_key(read_key(key_file, "key_file"), "epd-serve/curve-key/1"))
    return zmq.curve_public(secret), secret


def _is_ipv4(address: str) -> bool:
    """Names are looked up as IPv6 ones: those that have no such address are found all the same."""
    try:
        return ipaddress.ip_address(address.removeprefix(_TCP).rpartition(":")[0]).version == 4
    except ValueError:
        return False
