"""What an agent is asked over its socket, and what it answers (`stream.py` says how that travels)."""

from __future__ import annotations

import msgspec

from deploy.runtime.protocol import Node, Observed, Order
from deploy.runtime.stream import EveryAnswer, EveryCall, Request
from epd_serve.peers import Peer
from epd_serve.roles import Role

AGENT_SOCKET = "agent.sock"
"""In the run directory."""


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


class Nodes(msgspec.Struct, tag=True, frozen=True):
    pass


class Watch(msgspec.Struct, tag=True, frozen=True):
    """Answered again and again. Whoever watches is told the lines for the operator, too."""


class Know(msgspec.Struct, tag=True, frozen=True):
    """These are there on other nodes; replaces what was said before."""

    peers: tuple[Peer, ...]


class Groups(msgspec.Struct, tag=True, frozen=True):
    """Which process groups run?"""


class Close(msgspec.Struct, tag=True, frozen=True):
    """End everything."""


Call = Start | Flip | Drain | Stop | Nodes | Watch | Know | Groups | Close | EveryCall


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


Answer = Done | Seen

to_agent: msgspec.json.Decoder[Request[Call]] = msgspec.json.Decoder(Request[Call])
from_agent: msgspec.json.Decoder[Answer | EveryAnswer] = msgspec.json.Decoder(Answer | EveryAnswer)
