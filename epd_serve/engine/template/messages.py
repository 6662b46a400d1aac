"""What an agent and the template say to each other, over a socket of packets. No vLLM, no torch.

A template that listens is ready. It serves one agent at a time, for as long as that one stays. The agent sends
requests, each with two descriptors: the file that gets the stage's output, and a socket of the stage's root. There the
root says its pid and waits for `GO`: until then it has done nothing, and ends when the other end is closed.
"""

from __future__ import annotations

import json
import socket
import struct
from dataclasses import asdict, dataclass

from epd_serve.packets import receive_packet, send_packet

GO = b"go\n"
NUMBER = struct.Struct("=i")
NOT_BEGUN = 71  # exit code of a root that was not told to go; as in deploy/host/spawned.py
TEMPLATE_NAME = "stage template"  # what the kernel calls it: arguments are those of its forks, too
API_SERVER_NAME = "API server"  # and the process that a root forks first


@dataclass(frozen=True)
class StageRequest:
    """A stage to start.

    Attributes:
        flags: of vLLM's API server. env: its complete environment.
        parent: pid of the process whose child the root is to become, as an orphan does, and with which it dies.
    """

    instance: str
    flags: list[str]
    env: dict[str, str]
    parent: int


def send_request(template: socket.socket, request: StageRequest, log: int, root: int) -> None:
    """Ask for a stage.

    Raises:
        OSError: the template has gone, or does not read.
    """
    send_packet(template, json.dumps(asdict(request)).encode(), (log, root))


def receive_request(agent: socket.socket) -> tuple[StageRequest, int, int]:
    """The request, and the two descriptors.

    Raises:
        EOFError: nobody can ask any more.
    """
    message, (log, root) = receive_packet(agent)
    return StageRequest(**json.loads(message)), log, root
