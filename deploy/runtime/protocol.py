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
from epd_serve.stage_plan import StagePlan

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
        arena_bytes: shared memory of the arena, where there are features. staging_bytes: of each KV link.
    """

    id: str
    kind: str
    devices: tuple[int, ...]
    room: Mapping[str, int] = field(default_factory=dict)
    start_s: Mapping[Role, float] = field(default_factory=dict)
    arena_bytes: int = 0
    staging_bytes: int = 0


@dataclass(frozen=True)
class Spec:
    """What an instance is. Two that are equal may stand for each other.

    Attributes:
        role: where it has both halves of the connector, the part that it is to take now.
        both: it has both halves: P or D by what the proxy is told, without a restart.
        digest: of the command of its stage, less what only names a life: id, port, incarnation, addresses. A role that
            may change is no part of it, nor are cores that may.
        needs: bytes of each resource that it takes.
        plan: its place. Its id says nothing; neighbours and shares are in the digest as far as its stage knows of them.
        stage: what its command is made from, without what names a life (`wire` adds that); its trace path is a folder.
        cores: on CPU, those that it computes on. featured: it sends or takes features.
    """

    role: Role
    devices: tuple[int, ...]
    digest: str
    node: str = "local"
    both: bool = False
    needs: Mapping[str, int] = field(default_factory=dict, compare=False)
    plan: InstancePlan | None = field(default=None, compare=False)
    stage: StagePlan | None = field(default=None, compare=False)
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
    DOWN = "down"  # between two lives, or over
    DRAINING = "draining"  # serves what it has, is given nothing new, and not started again
    STOPPING = "stopping"


@dataclass(frozen=True)
class Observed:
    """One instance as its runtime sees it.

    Attributes:
        instance: of its present life, what a proxy is told; None before the first.
        reason: why it is down.
        ever_up: it has answered once.
        over: it is down and will not be started again: its first start has failed, or it was draining when it ended.
        up_s: since this life answered; 0 until then. restarts: lives before this one.
        progress: what a start is at, in a few words. start_s: how long it took until this life answered; 0 until then.
        retry_in_s: between two lives, from the end of the last one to the next start.
    """

    order: Order
    phase: Phase
    instance: Instance | None = None
    reason: str = ""
    pid: int | None = None
    up_s: float = 0.0
    restarts: int = 0
    ever_up: bool = False
    over: bool = False
    progress: str = ""
    start_s: float = 0.0
    retry_in_s: float | None = None

    @property
    def serves(self) -> bool:
        """It answers, be it only what it has been given already."""
        return self.phase is Phase.UP or (self.phase is Phase.DRAINING and self.start_s > 0)


class Runtime(Protocol):
    """Every call is idempotent: whoever lost the answer asks again."""

    async def nodes(self) -> tuple[Node, ...]: ...

    async def start(self, order: Order) -> None:
        """Accepted, and from now on kept alive. One that is draining is taken back.

        Raises:
            ConfigError: no such node or device, or the id is another's, or of one that is being stopped.
        """

    async def flip(self, id: str, role: Role) -> None:
        """An instance with both halves takes the other part from now on."""

    async def share(self, order: Order) -> None:
        """An instance computes on the cores of this order from now on, and does once this returns.

        Raises:
            ConfigError: it does not, and computes where it did before.
        """

    async def drain(self, id: str) -> None:
        """It is not started again when it ends."""

    async def stop(self, id: str, grace_s: float) -> None:
        """End it: SIGTERM, and SIGKILL after `grace_s`. Returns when nothing of it is left, or nothing was there."""

    def watch(self) -> AsyncIterator[tuple[Observed, ...]]:
        """All instances, at once and after each change. States may be skipped, the last one is never."""
        ...
