"""What an agent knows of each instance that is to run, and tells those who watch. Fed by its supervisor."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace

from deploy.agent.wiring import Site, instance_of, wire
from deploy.runtime.protocol import Observed, Order, Phase
from epd_serve.instances import Instance
from epd_serve.peers import Peer, peer_of, write_peers
from epd_serve.roles import Role
from epd_serve.stage_plan import StagePlan
from npu_ops.core_grants import read_grants

_RECENT = 8  # starts of a role whose mean is told


@dataclass
class Kept:
    """One instance.

    Attributes:
        phase: of its life, whatever is wanted of it: STARTING, UP or DOWN.
        over: it will not be started again.
        stage, instance: of this life.
        up_at: monotonic, when it answered; 0 until then.
    """

    order: Order
    port: int
    phase: Phase = Phase.STARTING
    draining: bool = False
    over: bool = False
    stopping: asyncio.Task[None] | None = None
    stage: StagePlan | None = None
    instance: Instance | None = None
    reason: str = ""
    pid: int | None = None
    lives: int = 0
    ever_up: bool = False
    up_at: float = 0.0
    start_s: float = 0.0
    progress: str = ""
    retry_in_s: float | None = None

    def ended(self) -> None:
        """This life, or none has begun."""
        self.pid, self.up_at, self.start_s, self.progress, self.retry_in_s = None, 0.0, 0.0, "", None

    def peer(self, site: Site) -> Peer:
        """As the others see it, in whichever life."""
        return peer_of(self.instance or instance_of(wire(self.order, site, self.port, "")), self.order.spec.role)

    def observed(self) -> Observed:
        phase = self.phase
        if self.stopping is not None:
            phase = Phase.STOPPING
        elif self.draining and phase is not Phase.DOWN:
            phase = Phase.DRAINING
        return Observed(
            self.order,
            phase,
            self.instance,
            reason=self.reason,
            pid=self.pid,
            up_s=time.monotonic() - self.up_at if self.up_at else 0.0,
            restarts=max(0, self.lives - 1),
            ever_up=self.ever_up,
            over=self.over,
            progress=self.progress,
            start_s=self.start_s,
            retry_in_s=self.retry_in_s,
        )


class Instances:
    """By id, in the order of their starts. A `deploy.agent.supervisor.StageEvents`.

    Args:
        say: takes a line for the operator.
    """

    def __init__(self, site: Site, say: Callable[[str], None]) -> None:
        self.kept: dict[str, Kept] = {}
        self._site = site
        self._say = say
        self._starts: dict[Role, list[float]] = {}
        self._peers: list[Peer] = []  # as they were written
        self._changes = 0
        self._changed = asyncio.Event()

    def start_s(self) -> Mapping[Role, float]:
        """How long the last starts took, on average."""
        return {role: sum(lately) / len(lately) for role, lately in self._starts.items()}

    def note(self) -> None:
        """Something has changed."""
        self._tell_stages()
        self._changes += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def watch(self) -> AsyncIterator[tuple[Observed, ...]]:
        """All of them, at once and after each change."""
        while True:
            told = self._changes
            yield tuple(kept.observed() for kept in self.kept.values())
            while self._changes == told:
                await self._changed.wait()

    def _tell_stages(self) -> None:
        """Who is there, and in which part, where that has changed. What cannot be written is with the next change."""
        peers = [kept.peer(self._site) for kept in self.kept.values()]
        if peers == self._peers:
            return
        try:
            write_peers(self._site.run.peers, peers)
        except OSError as error:
            self._say(f"warning: stages are not told who is there: {error}")
        else:
            self._peers = peers

    # --- what the supervisor says ---------------------------------------------------------------------------------

    def before_spawn(self, stage: str, incarnation: str) -> None:
        kept = self.kept[stage]
        self._site.run.clear_instance(stage)
        kept.stage = wire(kept.order, self._site, kept.port, incarnation)
        kept.instance = instance_of(kept.stage)
        kept.ended()
        kept.phase, kept.lives = Phase.STARTING, kept.lives + 1
        self.note()

    def spawned(self, stage: str, pid: int) -> None:
        self._site.run.record_group(stage, pid)
        self.kept[stage].pid = pid
        self.note()

    def phase(self, stage: str, phase: str) -> None:
        self.kept[stage].progress = phase
        self.note()

    def up(self, stage: str, incarnation: str, seconds: float) -> None:
        kept = self.kept[stage]
        self._hear_cores(kept)
        kept.phase, kept.ever_up, kept.reason, kept.progress = Phase.UP, True, "", ""
        kept.up_at, kept.start_s = time.monotonic(), seconds
        lately = self._starts.setdefault(kept.order.spec.role, [])
        lately[:] = [*lately[1 - _RECENT :], seconds]
        self.note()

    def _hear_cores(self, kept: Kept) -> None:
        """Whoever has a share has said by now what its workers got."""
        stage = kept.stage
        assert stage is not None and kept.instance is not None, "before_spawn has made them"
        if stage.core_order is None:
            return
        grants = read_grants(stage.core_order.report, stage.tp)
        if len(grants) < stage.tp:
            self._say(f"warning: {stage.instance} does not say how many cores it got: its share may not be enforced")
        kept.instance = replace(kept.instance, cores=grants)

    def down(self, stage: str, incarnation: str, reason: str, retry_in_s: float | None) -> None:
        kept = self.kept[stage]
        kept.ended()
        kept.phase, kept.reason, kept.retry_in_s = Phase.DOWN, reason, retry_in_s
        self.note()

    def over(self, stage: str, reason: str) -> None:
        kept = self.kept[stage]
        kept.ended()
        kept.phase, kept.reason, kept.over = Phase.DOWN, reason or kept.reason, True
        self.note()
