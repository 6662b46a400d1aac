"""What an agent knows of each instance that is to run: written down, then told to those who watch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from deploy.agent.stage_life import Record
from deploy.agent.supervisor import StageEvents
from deploy.agent.wiring import Site, instance_of, wire
from deploy.host.state import State
from deploy.runtime.protocol import Observed, Order, Phase, Spec
from epd_serve.errors import ConfigError
from epd_serve.instances import Instance
from epd_serve.peers import Peer, peer_of, write_peers
from epd_serve.roles import Role
from epd_serve.stage_plan import StagePlan
from npu_ops.core_grants import read_grants

INSTANCES, KNOWN = "instances", "known peers"
"""Sections of the state: of what runs here, and of those who are on other nodes."""

OBEYED_S, LOOK_S = 6.0, 0.05
"""In which a stage has to say that it computes on other cores: it looks once a second (`epd_serve.peers.LOOK_S`)."""

_RECENT = 8  # starts of a role whose mean is told


@dataclass
class Kept:
    """One instance: all that the next agent has to know of it.

    Attributes:
        record: of its lives, which its supervisor keeps.
        stop_by: it is being ended, from then on by SIGKILL; seconds of the machine's monotonic clock.
        stage, instance: of this life. progress: what its start is at, or was.
    """

    order: Order
    port: int
    record: Record = field(default_factory=Record)
    draining: bool = False
    stop_by: float | None = None
    stage: StagePlan | None = None
    instance: Instance | None = None
    progress: str = ""

    def copy(self) -> Kept:
        """As it is now."""
        return replace(self, record=replace(self.record))

    def peer(self, site: Site) -> Peer:
        """As the others see it, in whichever life."""
        return peer_of(self.instance or instance_of(wire(self.order, site, self.port, "")), self.order.spec.role)

    def observed(self) -> Observed:
        record, phase = self.record, self.record.phase
        down = phase is Phase.DOWN
        if self.stop_by is not None:
            phase = Phase.STOPPING
        elif self.draining and not down:
            phase = Phase.DRAINING
        return Observed(
            self.order,
            phase,
            self.instance,
            reason=record.reason,
            pid=None if down else record.pid or None,
            up_s=record.up_s,
            restarts=max(0, record.lives - 1),
            ever_up=record.ever_up,
            over=record.over,
            progress=self.progress if record.phase is Phase.STARTING else "",
            start_s=record.start_s,
            retry_in_s=record.delay_s if down and record.next_at else None,
        )


class Instances(StageEvents):
    """By id, in the order of their starts.

    Args:
        say: takes a line for the operator.
        state: has what an agent before this one has known.
    """

    def __init__(self, site: Site, say: Callable[[str], None], state: State) -> None:
        noted = msgspec.msgpack.decode(state.read(INSTANCES) or b"\x90", type=list[Kept])
        self.kept = {kept.order.id: kept for kept in noted}
        self._site = site
        self._say = say
        self._state = state
        self._starts: dict[Role, list[float]] = {}
        for kept in noted:
            if kept.record.start_s:
                self._note_start(kept)
        self._known = msgspec.msgpack.decode(state.read(KNOWN) or b"\x90", type=tuple[Peer, ...])  # on other nodes
        self._peers: list[Peer] = []  # as they were written
        self._told: tuple[Kept, ...] | None = None
        self._changed = asyncio.Event()

    def know(self, peers: tuple[Peer, ...]) -> None:
        """These are on other nodes, and nobody else."""
        if peers != self._known:
            self._known = peers
            self.note()

    def start_s(self) -> Mapping[Role, float]:
        """How long the last starts took, on average."""
        return {role: sum(lately) / len(lately) for role, lately in self._starts.items()}

    def note(self) -> None:
        """Something has changed. It is written down before anybody who watches hears of it."""
        self._tell_stages()
        self._state.write(INSTANCES, msgspec.msgpack.encode(list(self.kept.values())))
        self._state.write(KNOWN, msgspec.msgpack.encode(self._known))
        self._tell()

    def _tell(self) -> None:
        self._told = tuple(kept.copy() for kept in self.kept.values())
        self._changed.set()
        self._changed = asyncio.Event()

    async def share(self, kept: Kept, spec: Spec) -> None:
        """It computes on the cores of this spec from now on, in its later lives, too.

        Raises:
            ConfigError: its workers do not say that they do, and it is as it was before.
        """
        before = kept.order
        if before.spec.cores == spec.cores:
            return
        self._reorder(kept, replace(before, spec=replace(spec, role=before.spec.role)))
        try:
            async with asyncio.timeout(OBEYED_S):
                while kept.record.phase is Phase.UP:
                    if self._obeys(kept):
                        break
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            self._reorder(kept, before)
            where = ", ".join(map(str, spec.cores))
            raise ConfigError(f"{kept.order.id} does not compute on cores {where} within {OBEYED_S:g} s") from None
        self.note()

    def _reorder(self, kept: Kept, order: Order) -> None:
        kept.order = order
        if kept.instance is not None:
            stage = wire(order, self._site, kept.port, kept.record.incarnation)
            now = instance_of(stage)
            kept.instance = replace(kept.instance, core_share=now.core_share, cpu_cores=now.cpu_cores)
        self.note()

    def _obeys(self, kept: Kept) -> bool:
        """Whether all its workers say that they compute on its cores and nowhere else; that is told, then."""
        assert kept.stage is not None and kept.stage.core_order is not None and kept.instance is not None
        grants = read_grants(kept.stage.core_order.report, kept.stage.tp)
        if len(grants) < kept.stage.tp or any(one.core_ids != kept.order.spec.cores for one in grants):
            return False
        kept.instance = replace(kept.instance, cores=grants)
        return True

    async def watch(self) -> AsyncGenerator[tuple[Observed, ...]]:
        """All of them, at once and after each change."""
        told = None
        while True:
            while self._told is told:
                await self._changed.wait()
            told = self._told
            assert told is not None, "what is told is noted first"
            yield tuple(kept.observed() for kept in told)

    def _tell_stages(self) -> None:
        """Who is there, and in which part, where that has changed. What cannot be written is with the next change."""
        peers = [*(kept.peer(self._site) for kept in self.kept.values()), *self._known]
        if peers == self._peers:
            return
        try:
            write_peers(self._site.run.peers, peers)
        except OSError as error:
            self._say(f"warning: stages are not told who is there: {error}")
        else:
            self._peers = peers

    # --- what the supervisor says ---------------------------------------------------------------------------------

    def before_spawn(self, stage: str) -> None:
        kept = self.kept[stage]
        self._site.run.clear_instance(stage)
        kept.stage = wire(kept.order, self._site, kept.port, kept.record.incarnation)
        kept.instance = instance_of(kept.stage)
        kept.progress = ""

    def spawned(self, stage: str, pid: int) -> None:
        self._site.run.record_group(stage, pid)

    def phase(self, stage: str, phase: str) -> None:
        self.kept[stage].progress = phase
        self._tell()

    def up(self, stage: str) -> None:
        kept = self.kept[stage]
        self._hear_cores(kept)
        self._note_start(kept)

    def _note_start(self, kept: Kept) -> None:
        lately = self._starts.setdefault(kept.order.spec.role, [])
        lately[:] = [*lately[1 - _RECENT :], kept.record.start_s]

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
