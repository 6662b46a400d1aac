"""What an agent is asked over its socket, and what it answers: one JSON object on a line.

Both ends come from one start of one program, so there are no versions here.
"""

from __future__ import annotations

import msgspec

from deploy.runtime.protocol import Node, Observed, Order
from epd_serve.peers import Peer
from epd_serve.roles import Role

AGENT_SOCKET = "agent.sock"
"""In the run directory."""

MAX_LINE_BYTES = 16 << 20


# What the agent is asked.


class Start(msgspec.Struct, tag=True, frozen=True):
    """As the calls of `Runtime`, all of them down to `Watch`."""

    order: Order


class Flip(msgspec.Struct, tag=True, frozen=True):
    id: str
    role: Role


class Drain(msgspec.Struct, tag=True, frozen=True):
    id: str


class Stop(msgspec.Struct, tag=True, frozen=True):
    id: str
    grace_s: float


class Know(msgspec.Struct, tag=True, frozen=True):
    """These instances, and no others, are there on other nodes."""

    peers: tuple[Peer, ...]


class Nodes(msgspec.Struct, tag=True, frozen=True):
    pass


class Watch(msgspec.Struct, tag=True, frozen=True):
    """Answered again and again. Whoever watches is told the lines for the operator, too."""


class Groups(msgspec.Struct, tag=True, frozen=True):
    """Which process groups run?"""


class Close(msgspec.Struct, tag=True, frozen=True):
    """End everything."""


class GiveUp(msgspec.Struct, tag=True, frozen=True):
    """Nobody looks at that watch any more."""


Call = Start | Flip | Drain | Stop | Know | Nodes | Watch | Groups | Close | GiveUp


class Request(msgspec.Struct, frozen=True):
    """`number`: of its answers; of the watch that is given up."""

    number: int
    call: Call


# What it answers.


class Done(msgspec.Struct, tag=True, frozen=True):
    """Each call has its own of these, the others are empty."""

    number: int
    nodes: tuple[Node, ...] = ()
    groups: dict[str, int] = {}


class Seen(msgspec.Struct, tag=True, frozen=True):
    """All instances, for a `Watch`."""

    number: int
    instances: tuple[Observed, ...]


class Refused(msgspec.Struct, tag=True, frozen=True):
    """A ConfigError, or where `config` is false a failure of the agent's."""

    number: int
    message: str
    param: str | None = None
    config: bool = True


class Line(msgspec.Struct, tag=True, frozen=True):
    """For the operator."""

    text: str


Answer = Done | Seen | Refused | Line

to_agent: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)
from_agent: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)


def line_of(message: Request | Answer) -> bytes:
    """As it travels."""
    return msgspec.json.encode(message) + b"\n"
