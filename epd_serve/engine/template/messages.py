"""What the launcher and the template say to each other, over a pair of sockets. No vLLM, no torch.

The template says `READY`, or why it cannot be one. The launcher then sends requests, each with two descriptors: the
file that gets the stage's output, and the socket on which the stage's root answers with two numbers: its pid at once,
and in the end how the stage's API server ended (an exit code, or minus a signal).
"""

from __future__ import annotations

import json
import socket
import struct
from dataclasses import asdict, dataclass

READY = b"ready\n"
NUMBER = struct.Struct("=i")
API_SERVER_NAME = "API server"  # what the kernel calls the process that the root forks first

_LENGTH = struct.Struct("=I")


@dataclass(frozen=True)
class StageRequest:
    """A stage to start: what to call it, the flags of vLLM's API server, and its complete environment."""

    instance: str
    flags: list[str]
    env: dict[str, str]


def encode_request(request: StageRequest) -> tuple[bytes, bytes]:
    """Head and body. The head takes the descriptors along: first that of the log, then that of the root's socket."""
    body = json.dumps(asdict(request)).encode()
    return _LENGTH.pack(len(body)), body


def receive_request(launcher: socket.socket) -> tuple[StageRequest, int, int]:
    """The request, and the two descriptors.

    Raises:
        EOFError: the launcher has gone.
    """
    head, descriptors, _, _ = socket.recv_fds(launcher, _LENGTH.size, 2, socket.MSG_CMSG_CLOEXEC | socket.MSG_WAITALL)
    if len(head) < _LENGTH.size:
        raise EOFError
    (length,) = _LENGTH.unpack(head)
    body = launcher.recv(length, socket.MSG_WAITALL)
    if len(body) < length:
        raise EOFError
    log, root = descriptors
    return StageRequest(**json.loads(body)), log, root
