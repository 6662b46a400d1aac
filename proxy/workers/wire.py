"""What proxy workers are told by whoever feeds them: the answers to `GET /setup` and `GET /watch`.

Both ends come from one start of one program, so there are no versions here. Nothing is pickled: settings and instances
are checked again where they are decoded.

Limits that are counted by each worker are divided among them (`share_of`). What is with the stages at once is divided
by `proxy/admission/gate.py`, which is told how many processes there are. Connections are spread evenly over them
(`proxy/server/shared_listener.py`), so an equal part each is what they need.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import msgspec

from epd_serve.errors import EpdError
from epd_serve.instances import Instance
from epd_serve.roles import Role
from proxy.config.keys import ApiKeys
from proxy.config.settings import ProxySettings

WATCH_S = 10.0
"""For which a watch waits for news, at most; then its answer is empty."""

NO_KEYS = msgspec.Raw(msgspec.msgpack.encode(None))

T = TypeVar("T")


class FeedError(EpdError):
    """The other end says what it cannot say: our fault, in one program of two processes."""


class Family(msgspec.Struct, frozen=True, array_like=True):
    """One metric as a process counts it. `samples`: name, labels in order, value."""

    name: str
    kind: str
    help: str
    samples: list[tuple[str, tuple[tuple[str, str], ...], float]]


class Row(msgspec.Struct, frozen=True):
    """One instance as the parent knows it.

    Attributes:
        healthy: it answers. reason: why not.
        draining: it is given nothing new.
        served: the parent has seen its KV links used, so a worker that starts later need not wait for them.
        slot: of the shared counters, where its present life is counted.
    """

    instance: Instance
    healthy: bool
    reason: str = ""
    draining: bool = False
    served: bool = False
    slot: int = 0


class Setup(msgspec.Struct, frozen=True):
    """What a worker is told at first, which holds as long as it lives.

    Attributes:
        rows: of the shared counters.
        grace_s: how long requests in flight may go on when all workers end. drain_s: when only this one does.
        link_grace_s: as of `InstanceTable`.
    """

    settings: ProxySettings
    rows: int
    grace_s: float
    drain_s: float
    link_grace_s: float


class Roster(msgspec.Struct, frozen=True):
    """All instances there are.

    Attributes:
        number: a later one has a larger one. From 1.
        wanted: roles that the deployment is to have.
        paused_s: for how long new requests wait yet.
        down: tasks of the parent that feed the workers and do not run, and why.
    """

    number: int
    rows: tuple[Row, ...]
    wanted: frozenset[Role] = frozenset()
    paused_s: float = 0.0
    down: dict[str, str] = {}


class Told(msgspec.Struct, frozen=True):
    """Answers a watch: everything. Replaces what was said before.

    Attributes:
        number: of the answer, larger than that of what was told before, also by another life of whoever feeds.
        roster: None while nothing is known yet: what a worker goes by is better.
        keys: `ApiKeys` of clients, as they are packed: thousands are not read again with each roster. Or `NO_KEYS`:
            those of its settings.
    """

    number: int
    roster: Roster | None = None
    keys: msgspec.Raw = NO_KEYS


def packed(value: Setup | Told | ProxySettings | ApiKeys) -> bytes:
    """For a process of the same version of this program."""
    return msgspec.msgpack.encode(value)


def unpacked(raw: bytes | msgspec.Raw, kind: type[T]) -> T:
    """Raises FeedError."""
    try:
        return msgspec.msgpack.decode(raw, type=kind)
    except msgspec.DecodeError as error:
        raise FeedError(f"not a {kind.__name__}: {error}") from error


def share_of(settings: ProxySettings, processes: int) -> ProxySettings:
    """The settings of each of `processes`. A limit never becomes 0, which would mean something else."""
    return replace(
        settings,
        max_in_flight=part(settings.max_in_flight, processes),
        key_limits=settings.key_limits.shared_by(processes),
        admission=replace(
            settings.admission,
            text_queue=part(settings.admission.text_queue, processes),
            media_queue=part(settings.admission.media_queue, processes),
        ),
        retry=replace(
            settings.retry,
            floor_per_s=settings.retry.floor_per_s / processes,
            burst=part(settings.retry.burst, processes),
        ),
        processes=processes,
    )


def part(limit: int, processes: int) -> int:
    """Rounded up."""
    return -(-limit // processes)
