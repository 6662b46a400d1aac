"""Runs the instances of this machine in the caller's event loop: a `deploy.runtime.protocol.Runtime`.

Owns what they share here: arena, template, ports, run directory. What an instance is comes with its order; whether all
of them together make sense is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from pathlib import Path

from deploy.agent.instances import Instances, Kept
from deploy.agent.second_tier import SecondTier
from deploy.agent.specs import orders
from deploy.agent.stage_life import Spawn
from deploy.agent.supervisor import StageSpec, Supervisor
from deploy.agent.template import stage_starts
from deploy.agent.waits import Patience
from deploy.agent.wiring import STAGE_HOST, Site, wire
from deploy.host.environment import shm_root, stage_environment
from deploy.host.ports import free_ports
from deploy.host.rundir import RunDir
from deploy.memory.shared_memory import RESERVE_MIB, SharedMemory, free_mib
from deploy.options.engines import command_of
from deploy.plan.blueprint import Blueprint
from deploy.runtime.protocol import HOST_MEMORY, SHARED_MEMORY, Node, Observed, Order, device_memory
from epd_serve.errors import ConfigError
from epd_serve.roles import Role
from epd_serve.stage_plan import StageCommand, StagePlan
from store.errors import StoreError

NODE = "local"


class Agent:
    """Use as `async with agent.running():`; calls are for inside.

    Args:
        blueprint: of the launch. Its model, options and devices are those of all instances, its layout is not.
        memory: sizes of the arena and of the staging buffer of each KV link.
        tier: the second tier, which runs; it begins when the first instance with features does.
        command_of: makes a stage's command; tests put a stand-in for vLLM here.
        patience: the supervisor's waits.
        say: takes a line for the operator.

    Attributes:
        arena_bytes: of the arena, once there is one. staging_bytes: of each KV link.
    """

    def __init__(
        self,
        run: RunDir,
        blueprint: Blueprint,
        memory: SharedMemory,
        *,
        say: Callable[[str], None],
        tier: SecondTier | None = None,
        command_of: Callable[[StagePlan], StageCommand] = command_of,
        patience: Patience | None = None,
    ) -> None:
        self.arena_bytes = memory.arena_mib << 20
        self.staging_bytes = memory.staging_mib << 20
        self._run = run
        self._blueprint = blueprint
        self._command_of = command_of
        self._say = say
        self._room = _room(blueprint)
        self._tier = tier or SecondTier(run)
        self._site = Site(run, self.staging_bytes, self._tier.address)
        self._instances = Instances(self._site, say)
        self._arena: asyncio.Task[None] | None = None
        config = blueprint.config
        self._supervisor = Supervisor(
            self._instances,
            replace(patience or Patience(), start_s=config.startup_timeout_s),
            config.parallel_starts if blueprint.device == "cpu" else 0,
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """When it ends, every stage has ended."""
        blueprint, config = self._blueprint, self._blueprint.config
        a_stage = self._spawn(wire(orders(blueprint)[0], self._site, 0, ""))
        log = self._run.log("template")
        async with stage_starts(
            config.stage_template, blueprint.device, a_stage, blueprint.model, log, self._say
        ) as self._supervisor.start:
            try:
                yield
            finally:
                await self._supervisor.close()
                if self._arena is not None:  # a thread goes on; what it makes has to be there to be removed
                    await asyncio.wait([self._arena])

    def groups(self) -> dict[str, int]:
        """Process groups that run now, by instance."""
        return self._supervisor.groups()

    def kill_now(self) -> None:
        """SIGKILL every group, without waiting."""
        self._supervisor.kill_now()

    # --- Runtime --------------------------------------------------------------------------------------------------

    async def nodes(self) -> tuple[Node, ...]:
        inventory = self._blueprint.inventory
        return (Node(NODE, inventory.kind, inventory.ids, self._room, self._instances.start_s()),)

    async def start(self, order: Order) -> None:
        kept = self._instances.kept.get(order.id)
        self._check(order, kept)
        if kept is None:
            self._begin(Kept(order, self._free_port()))
        elif kept.over and kept.ever_up:  # it ended while it drained
            self._begin(Kept(order, kept.port))
        else:
            self._drains(kept, False)

    async def flip(self, id: str, role: Role) -> None:
        kept = self._instances.kept.get(id)
        if kept is None or kept.order.spec.role is role:
            return
        if not kept.order.spec.both:
            raise ConfigError(f"{id} has one half of the KV connector and cannot become {role}")
        kept.order = replace(kept.order, spec=replace(kept.order.spec, role=role))
        if kept.instance is not None:
            kept.instance = replace(kept.instance, role=role)
        self._instances.note()

    async def drain(self, id: str) -> None:
        if (kept := self._instances.kept.get(id)) is not None:
            self._drains(kept, True)

    async def stop(self, id: str, grace_s: float) -> None:
        if (kept := self._instances.kept.get(id)) is None:
            return
        if kept.stopping is None:
            kept.stopping = asyncio.create_task(self._end(id, grace_s), name=f"stop {id}")
            self._instances.note()
        await asyncio.shield(kept.stopping)

    def watch(self) -> AsyncIterator[tuple[Observed, ...]]:
        return self._instances.watch()

    # --- carrying it out ------------------------------------------------------------------------------------------

    def _check(self, order: Order, kept: Kept | None) -> None:
        """Raises ConfigError."""
        spec, inventory = order.spec, self._blueprint.inventory
        if spec.node != NODE:
            raise ConfigError(f"{order.id} is to run on {spec.node}: there is {NODE} alone")
        if inventory.kind != "cpu" and (unknown := set(spec.devices) - set(inventory.ids)):
            raise ConfigError(f"{order.id} is to run on {inventory.kind} {min(unknown)}, which is not there")
        if kept is not None and kept.stopping is not None:
            raise ConfigError(f"{order.id} is being stopped: start it under another name, or when it is gone")
        if kept is not None and not kept.order.spec.stands_for(spec):
            raise ConfigError(f"{order.id} is the name of another instance")

    def _begin(self, kept: Kept) -> None:
        name, spec = kept.order.id, kept.order.spec
        self._instances.kept[name] = kept
        self._instances.note()

        def command(incarnation: str) -> Spawn:
            assert kept.stage is not None, "wired before"
            return self._spawn(kept.stage)

        async def prepare() -> None:
            if spec.featured:
                await self._make_arena()
                await self._tier.begin()

        # Memory is profiled at the start on NPU and CUDA: neighbours on a device must not start together.
        turns = [] if self._blueprint.device == "cpu" else [str(device) for device in spec.devices]
        self._supervisor.add(StageSpec(name, STAGE_HOST, kept.port, self._run.log(name), command, prepare, turns))

    def _drains(self, kept: Kept, draining: bool) -> None:
        if kept.draining is not draining and not kept.over:
            kept.draining = draining
            self._supervisor.retire(kept.order.id, draining)
            self._instances.note()

    async def _end(self, name: str, grace_s: float) -> None:
        await self._supervisor.remove(name, grace_s)
        self._run.clear_instance(name)
        del self._instances.kept[name]
        self._instances.note()

    def _spawn(self, stage: StagePlan) -> Spawn:
        made = self._command_of(stage)
        return Spawn(made.argv, stage_environment(made.env, self._run.path, self._blueprint.device))

    def _free_port(self) -> int:
        taken = {kept.port for kept in self._instances.kept.values()}
        return next(port for port in free_ports(len(taken) + 1) if port not in taken)

    async def _make_arena(self) -> None:
        """The host arena is there, pre-faulted, before any stage attaches to it; it goes with the run directory.

        Raises:
            ConfigError: there is no room for it.
        """
        from store.arena import Arena

        def make(unnamed: Path) -> None:
            unnamed.unlink(missing_ok=True)
            Arena.create(unnamed, capacity_bytes=self.arena_bytes).close()
            unnamed.rename(self._run.arena)

        if self._run.arena.exists():
            return
        if self._arena is None or self._arena.done():
            self._arena = asyncio.create_task(asyncio.to_thread(make, self._run.arena.with_suffix(".new")))
        try:
            await asyncio.shield(self._arena)
        except StoreError as error:
            raise ConfigError(str(error)) from error


def _room(blueprint: Blueprint) -> Mapping[str, int]:
    """Bytes by resource that instances may take together, from what was there before any of them ran.

    What nobody tells the size of is left out: the engine will find out. Of a device it is what was free, for others may
    be on it. Of the host it is all: what is free there changes by the second, and the page cache gives way.
    """
    room = {SHARED_MEMORY: (free_mib(shm_root()) - RESERVE_MIB) << 20}
    for one in blueprint.properties:
        if one.total_bytes is None:
            continue
        if blueprint.device == "cpu":
            room[HOST_MEMORY] = one.total_bytes
        else:
            room[device_memory(one.index)] = one.total_bytes if one.free_bytes is None else one.free_bytes
    return room
