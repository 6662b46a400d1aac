"""What a deployment asks of whatever runs its instances: processes of this host, or actors and pods of many.

Told what to run, not how: a call is accepted at once or refused, may be repeated, and shows in `watch` when it has
happened. Whoever watches gets everything at once and again after each change, so nothing is missed by coming late.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

from epd_serve.instances import Instance
from epd_serve.placement import InstancePlan
from epd_serve.roles import Role

HOST_MEMORY, SHARED_MEMORY = "host memory", "/dev/shm"


def device_memory(device: int) -> str:
    """The resource's name."""
    return f"memory of device {device}"


@dataclass(frozen=True)
class Node:
    """A machine.

    Attributes:
        kind: of its devices: `npu`, `cuda` or `cpu`.
        devices: their ids.
        room: bytes of each resource that all instances together may take. A resource that is not named is not short.
        start_s: how long starts have taken lately, by role, seconds.
    """

    id: str
    kind: str
    devices: tuple[int, ...]
    room: Mapping[str, int] = field(default_factory=dict)
    start_s: Mapping[Role, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Spec:
    """What an instance is. Two that are equal may stand for each other.

    Attributes:
        role: where it has both halves of the connector, the part that it is to take now.
        both: it has both halves: P or D by what the proxy is told, without a restart.
        digest: of the command of its stage, less what only names a life: id, port, incarnation, addresses. A role that
            may change is no part of it.
        needs: bytes of each resource that it takes.
        plan: its place. Its id says nothing; neighbours and shares are in the digest as far as its stage knows of them.
        featured: it sends or takes features.
    """

    role: Role
    devices: tuple[int, ...]
    digest: str
    node: str = "local"
    both: bool = False
    needs: Mapping[str, int] = field(default_factory=dict, compare=False)
    plan: InstancePlan | None = field(default=None, compare=False)
    cores: tuple[int, ...] = field(default=(), compare=False)
    featured: bool = field(default=False, compare=False)

    def stands_for(self, other: Spec) -> bool:
        """Whether an instance of this spec is, or becomes by a flip, what the other one asks for."""
        return (replace(self, role=other.role) if self.both else self) == other


@dataclass(frozen=True)
class Order:
    """Run this, until told otherwise."""

    id: str
    spec: Spec


class Phase(StrEnum):
    STARTING = "starting"
    UP = "up"
    DOWN = "down"  # between two lives, or given up before its first
    DRAINING = "draining"  # serves what it has, is given nothing new, and not started again
    STOPPING = "stopping"


@dataclass(frozen=True)
class Observed:
    """One instance as its runtime sees it.

    Attributes:
        instance: of its present life, what a proxy is told; None before the first.
        reason: why it is down.
        ever_up: it has answered once. One that has not and is down will not be started again.
        up_s: since it answered. restarts: lives before this one.
    """

    order: Order
    phase: Phase
    instance: Instance | None = None
    reason: str = ""
    pid: int | None = None
    up_s: float = 0.0
    restarts: int = 0
    ever_up: bool = False


class Runtime(Protocol):
    """Every call is idempotent: whoever lost the answer asks again."""

    async def nodes(self) -> tuple[Node, ...]: ...

    async def start(self, order: Order) -> None:
        """Accepted, and from now on kept alive. One that is draining is taken back.

        Raises:
            ConfigError: no such node or device, or the id is another's.
        """

    async def flip(self, id: str, role: Role) -> None:
        """An instance with both halves takes the other part from now on."""

    async def drain(self, id: str) -> None:
        """It is not started again when it ends."""

    async def stop(self, id: str, grace_s: float) -> None:
        """End it: SIGTERM, and SIGKILL after `grace_s`. Returns when nothing of it is left, or nothing was there."""

    def watch(self) -> AsyncIterator[tuple[Observed, ...]]:
        """All instances, at once and after each change. States may be skipped, the last one is never."""
        ...
