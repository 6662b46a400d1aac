"""What the front part of a node is asked over its socket, and what it answers (`deploy/runtime/stream.py` says how that
travels)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from deploy.runtime.protocol import Observed
from deploy.runtime.stream import EveryAnswer, EveryCall, Request
from epd_serve.phases.stamps import Stamp
from epd_serve.roles import Role
from proxy.config.keys import ApiKeys
from proxy.records.records import Question, RecordsAnswer
from proxy.registry.ledger import Tally, Work
from proxy.workers.shared_counters import Asked
from proxy.workers.wire import Family

FRONT_SOCKET = "front.sock"
"""In the run directory."""


# What it is asked. All but `State` and `Watch` as the calls of `FrontDoors`.


class State(msgspec.Struct, tag=True, frozen=True):
    """Everything that its front doors are to know. Replaces what was said before.

    Attributes:
        leaving: instances that are given nothing new although their runtime says nothing of the kind.
        paused_s: for how long new requests wait, counted from when this arrives; 0: they do not.
        asked: what all front doors are to do.
        settings: `ProxySettings` of front doors that start from now on, packed; empty: those they began with.
        api_keys: those of clients from now on; None: those of the settings.
    """

    instances: tuple[Observed, ...]
    wanted: tuple[Role, ...]
    leaving: tuple[str, ...] = ()
    paused_s: float = 0.0
    asked: Asked = Asked.SERVE
    settings: bytes = b""
    api_keys: ApiKeys | None = None


class Watch(msgspec.Struct, tag=True, frozen=True):
    """Answered again and again. Whoever watches is told the lines for the operator, too."""


class Ready(msgspec.Struct, tag=True, frozen=True):
    pass


class AllSeen(msgspec.Struct, tag=True, frozen=True):
    """All that was said on this connection before."""


class UntilEmpty(msgspec.Struct, tag=True, frozen=True):
    id: str


class UntilQuiet(msgspec.Struct, tag=True, frozen=True):
    id: str


class PausableS(msgspec.Struct, tag=True, frozen=True):
    pass


class Counts(msgspec.Struct, tag=True, frozen=True):
    """For `/metrics`."""


class Look(msgspec.Struct, tag=True, frozen=True):
    """What is known of requests?"""

    question: Question


class Stamps(msgspec.Struct, tag=True, frozen=True):
    """What is stamped on this node about these subjects, and what is the time there? Of none, the time alone."""

    subjects: Sequence[str] = ()


class Restart(msgspec.Struct, tag=True, frozen=True):
    pass


class Idle(msgspec.Struct, tag=True, frozen=True):
    """Answered when nothing is left of requests."""


class End(msgspec.Struct, tag=True, frozen=True):
    pass


Call = (
    State
    | Watch
    | Ready
    | AllSeen
    | UntilEmpty
    | UntilQuiet
    | PausableS
    | Counts
    | Look
    | Stamps
    | Restart
    | Idle
    | End
    | EveryCall
)


# What it answers.


class Leases(msgspec.Struct, frozen=True, array_like=True):
    """What front doors have given one life of an instance."""

    id: str
    incarnation: str
    tallies: dict[Work, Tally]


class Word(msgspec.Struct, tag=True, frozen=True):
    """To a `Watch`.

    Attributes:
        pids: of the front doors, by name.
        running: requests in flight. replacing: front doors are being replaced.
    """

    number: int
    leases: tuple[Leases, ...] = ()
    pids: dict[str, int] = {}
    running: int = 0
    replacing: bool = False


class Done(msgspec.Struct, tag=True, frozen=True):
    """`pausable_s`: None for as long as you like. `time_s`: of the monotonic clock there."""

    number: int
    pausable_s: float | None = None
    counts: list[Family] = []
    records: RecordsAnswer = RecordsAnswer()
    stamps: Sequence[Stamp] = ()
    time_s: float = 0.0


Answer = Done | Word

to_front: msgspec.json.Decoder[Request[Call]] = msgspec.json.Decoder(Request[Call])
from_front: msgspec.json.Decoder[Answer | EveryAnswer] = msgspec.json.Decoder(Answer | EveryAnswer)
