"""Messages between processes of one machine that arrive whole or not at all, of any size, with descriptors.

Over a SOCK_SEQPACKET pair, on which nobody ever reads half a message, nor half of what a dead sender was about to say.
The kernel takes no message there that is larger than a socket's buffer (some 200 KB): a large one travels as a file in
memory.
"""

from __future__ import annotations

import array
import errno
import os
import socket
from collections.abc import Sequence

INLINE_BYTES = 32 << 10
MAX_DESCRIPTORS = 250
"""With one message; the kernel takes 253."""

_INLINE, _IN_FILE = b"i", b"f"


def packet_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send_packet(connection: socket.socket, message: bytes, descriptors: Sequence[int] = ()) -> None:
    """Send a message, and copies of the descriptors.

    Raises:
        ValueError: too many descriptors. OSError: the other end has gone; BlockingIOError: it does not read.
    """
    if len(descriptors) > MAX_DESCRIPTORS:
        raise ValueError(f"{len(descriptors)} file descriptors cannot be handed over in one message")
    if len(message) <= INLINE_BYTES:
        _send(connection, _INLINE + message, descriptors)
        return
    file = os.memfd_create("packet")
    try:
        with open(file, "wb", closefd=False) as writing:
            writing.write(message)
        _send(connection, _IN_FILE, [file, *descriptors])
    finally:
        os.close(file)


def receive_packet(connection: socket.socket) -> tuple[bytes, list[int]]:
    """The next message, and its descriptors, which no program inherits. They are the caller's to close.

    Raises:
        EOFError: the other end has gone. BlockingIOError: nothing is there yet, and the socket does not wait.
        OSError: there is no room for the descriptors.
    """
    space = socket.CMSG_LEN((1 + MAX_DESCRIPTORS) * array.array("i").itemsize)
    try:  # `socket.recv_fds` takes flags, and does not pass them on
        head, ancillary, how, _ = connection.recvmsg(1 + INLINE_BYTES, space, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:  # it has gone without reading all
        raise EOFError from None
    descriptors = _descriptors(ancillary)
    if not head:
        raise EOFError
    if how & socket.MSG_CTRUNC:
        close_all(descriptors)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    if head[:1] == _INLINE:
        return head[1:], descriptors
    file, *rest = descriptors
    with open(file, "rb") as reading:
        reading.seek(0)
        return reading.read(), rest


def _descriptors(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    found = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return found.tolist()


def close_all(descriptors: Sequence[int]) -> None:
    for one in descriptors:
        os.close(one)


def _send(connection: socket.socket, message: bytes, descriptors: Sequence[int]) -> None:
    if descriptors:
        socket.send_fds(connection, [message], descriptors)
    else:
        connection.send(message)
