"""Runs the instances of this machine: a `deploy.runtime.protocol.Runtime`.

Owns what they share here: arena, template, ports, the second tier's master. What an instance is comes with its order;
whether all of them together make sense is decided elsewhere. Its processes outlive it and what it knows of them is
written down, so that it may be killed at any moment: the next agent goes on with all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

from deploy.agent.instances import Instances, Kept
from deploy.agent.second_tier import SecondTier
from deploy.agent.setup import AgentSetup
from deploy.agent.specs import orders
from deploy.agent.stage_life import Spawn, executed
from deploy.agent.supervisor import StageSpec, Supervisor
from deploy.agent.template import NAME as TEMPLATE
from deploy.agent.template import Template, common_environment, is_wanted
from deploy.agent.wiring import wire
from deploy.host.children import Child, Children
from deploy.host.environment import stage_environment
from deploy.host.logs import keep_bounded
from deploy.host.ports import PortBlocks
from deploy.host.state import State
from deploy.options.mooncake import MASTER_PROGRAM
from deploy.runtime.protocol import Node, Observed, Order
from epd_serve.engine.stage_guard import KEY_ENV
from epd_serve.errors import ConfigError
from epd_serve.key_files import read_key, stage_key
from epd_serve.peers import Peer
from epd_serve.roles import Role
from epd_serve.stage_plan import StagePlan
from store.errors import StoreError


class HostArena:
    """At `path`. It outlives the agent that has made it, and goes with the run directory."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        self._path = path
        self._size_bytes = size_bytes
        self._making: asyncio.Task[None] | None = None

    async def make(self) -> None:
        """It is there, pre-faulted, before any stage attaches to it. Any number of calls.

        Raises:
            ConfigError: there is no room for it.
        """
        if self._path.exists():
            return
        if self._making is None or self._making.done():
            self._making = asyncio.create_task(asyncio.to_thread(self._make))
        try:
            await asyncio.shield(self._making)
        except StoreError as error:
            raise ConfigError(str(error)) from error

    async def settled(self) -> None:
        """Nobody makes it any more: a thread goes on, and what it makes has to be there to be removed."""
        if self._making is not None:
            await asyncio.wait([self._making])

    def _make(self) -> None:
        from store.arena import Arena

        unnamed = self._path.with_suffix(".new")
        unnamed.unlink(missing_ok=True)
        Arena.create(unnamed, capacity_bytes=self._size_bytes).close()
        unnamed.rename(self._path)


class Agent:
    """Use as `async with agent.running():`; calls are for inside.

    Args:
        children: starts and watches the processes. state: has what an agent before this one has known.
        say: takes a line for the operator.
    """

    def __init__(self, setup: AgentSetup, children: Children, state: State, *, say: Callable[[str], None]) -> None:
        self._setup = setup
        self._children = children
        self._state = state
        self._say = say
        self._tier = SecondTier(setup.run, setup.tier, children, state, say)
        self._instances = Instances(setup.site, say, state)
        self._ports = PortBlocks(setup.net.host, setup.net.ports)
        self._arena = HostArena(setup.run.arena, setup.arena_bytes)
        self._template: Template | None = None
        self._stops: dict[str, asyncio.Task[None]] = {}
        parallel = setup.blueprint.config.parallel_starts if setup.blueprint.device == "cpu" else 0
        self._supervisor = Supervisor(self._instances, setup.patience, parallel, start=executed(children))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Goes on with whatever an agent before this one has left. Whoever wants all to end says `close` before."""
        blueprint, run = self._setup.blueprint, self._setup.run
        a_stage = self._spawn(wire(orders(blueprint)[0], self._setup.site, 0, ""))
        async with contextlib.AsyncExitStack() as stack:
            if is_wanted(blueprint.config.stage_template, blueprint.device, a_stage):
                env = common_environment(a_stage.env)
                template = Template(blueprint.model, env, run.path, self._say, self._children, self._state)
                await stack.enter_async_context(template.running())
                self._template, self._supervisor.start = template, template.start
            self._adopt()
            bounding = asyncio.create_task(keep_bounded(run.path), name="logs")
            try:
                yield
            finally:
                bounding.cancel()

    async def close(self) -> None:
        """End all instances, and all that they share. Any number of calls."""
        grace_s = self._setup.patience.stop_grace_s
        async with asyncio.TaskGroup() as group:
            for name in self._instances.kept:
                group.create_task(self.stop(name, grace_s))
        await self._tier.close()
        await self._arena.settled()

    async def groups(self) -> dict[str, int]:
        """Process groups that run now: of the instances, and of what they share, by name."""
        shared = {MASTER_PROGRAM: self._tier.pid, TEMPLATE: self._template.pid if self._template is not None else 0}
        return {**self._supervisor.groups(), **{name: pid for name, pid in shared.items() if pid}}

    # --- Runtime --------------------------------------------------------------------------------------------------

    async def nodes(self) -> tuple[Node, ...]:
        return (replace(self._setup.node(), start_s=self._instances.start_s()),)

    async def start(self, order: Order) -> None:
        kept = self._instances.kept.get(order.id)
        self._check(order, kept)
        if kept is None:
            self._begin(Kept(order, self._ports.take(self._setup.site.ports_of(order))))
        elif kept.record.over and kept.record.ever_up:  # it ended while it drained
            self._begin(Kept(order, kept.port))
        else:
            self._drains(kept, False)

    async def flip(self, id: str, role: Role) -> None:
        kept = self._instances.kept.get(id)
        if kept is not None and kept.order.spec.role is not role:
            if not kept.order.spec.both:
                raise ConfigError(f"{id} has one half of the KV connector and cannot become {role}")
            kept.order = replace(kept.order, spec=replace(kept.order.spec, role=role))
            if kept.instance is not None:
                kept.instance = replace(kept.instance, role=role)
            self._instances.note()

    async def share(self, order: Order) -> None:
        if (kept := self._instances.kept.get(order.id)) is not None:
            self._check(order, kept)
            await self._instances.share(kept, order.spec)

    async def drain(self, id: str) -> None:
        if (kept := self._instances.kept.get(id)) is not None:
            self._drains(kept, True)

    async def stop(self, id: str, grace_s: float) -> None:
        if (kept := self._instances.kept.get(id)) is not None:
            self._stops_with(kept, grace_s)
        if (stop := self._stops.get(id)) is not None:
            await asyncio.shield(stop)

    async def know(self, peers: tuple[Peer, ...]) -> None:
        """These, and nobody else, are there on other nodes."""
        self._instances.know(peers)

    def watch(self) -> AsyncGenerator[tuple[Observed, ...]]:
        return self._instances.watch()

    # --- carrying it out ------------------------------------------------------------------------------------------

    def _check(self, order: Order, kept: Kept | None) -> None:
        """Raises ConfigError."""
        spec, inventory, node = order.spec, self._setup.blueprint.inventory, self._setup.net.node
        if spec.node != node:
            raise ConfigError(f"{order.id} is to run on {spec.node}: this is {node}")
        if inventory.kind != "cpu" and (unknown := set(spec.devices) - set(inventory.ids)):
            raise ConfigError(f"{order.id} is to run on {inventory.kind} {min(unknown)}, which is not there")
        if kept is not None and kept.stop_by is not None:
            raise ConfigError(f"{order.id} is being stopped: start it under another name, or when it is gone")
        if kept is not None and not kept.order.spec.stands_for(spec):
            raise ConfigError(f"{order.id} is the name of another instance")

    def _begin(self, kept: Kept) -> None:
        self._instances.kept[kept.order.id] = kept
        self._instances.note()
        self._supervise(kept, None)

    def _supervise(self, kept: Kept, process: Child | None) -> None:
        name, spec = kept.order.id, kept.order.spec
        ports = self._setup.site.ports_of(kept.order)

        def command() -> Spawn:
            assert kept.stage is not None, "wired before"
            return self._spawn(kept.stage)

        async def prepare() -> None:
            if spec.featured:
                await self._arena.make()
                await self._tier.begin()
            kept.port = self._ports.take_again(kept.port, ports)
            stage.url = self._url(kept)

        # Memory is profiled at the start on NPU and CUDA: neighbours on a device must not start together.
        turns = [] if self._setup.blueprint.device == "cpu" else [str(device) for device in spec.devices]
        stage = StageSpec(name, self._url(kept), self._setup.run.log(name), command, prepare, turns)
        self._supervisor.add(stage, kept.record, process)

    def _url(self, kept: Kept) -> str:
        return wire(kept.order, self._setup.site, kept.port, "").url

    def _drains(self, kept: Kept, draining: bool) -> None:
        if kept.draining is not draining and not kept.record.over:
            kept.draining = draining
            self._supervisor.retire(kept.order.id, draining)
            self._instances.note()

    def _stops_with(self, kept: Kept, grace_s: float) -> None:
        name = kept.order.id
        if (stop := self._stops.get(name)) is None or stop.done():  # done: it has failed
            if kept.stop_by is None:
                kept.stop_by = time.monotonic() + grace_s
            self._instances.note()
            self._stops[name] = asyncio.create_task(self._end(name, kept.stop_by), name=f"stop {name}")

    async def _end(self, name: str, by: float) -> None:
        await self._supervisor.remove(name, max(0.0, by - time.monotonic()))
        self._setup.run.clear_instance(name)
        kept = self._instances.kept.pop(name)
        self._ports.give_back(kept.port, self._setup.site.ports_of(kept.order))
        del self._stops[name]
        self._instances.note()

    def _spawn(self, stage: StagePlan) -> Spawn:
        made, device = self._setup.command_of(stage), self._setup.blueprint.device
        env = stage_environment(made.env, self._setup.run.path, device, self._children.root)
        if stage.guarded:
            env[KEY_ENV] = stage_key(read_key(self._setup.net.key_file, "key_file"))
        return Spawn(made.argv, env)

    def _adopt(self) -> None:
        """Go on with what is written down. Nothing is told before all of it is known."""
        self._tier.adopt()
        adopted = [*self._instances.kept.values()]
        for kept in adopted:
            self._ports.adopt(kept.port, self._setup.site.ports_of(kept.order))
        # Those that run come first: they have had their turn to start.
        for kept in sorted(adopted, key=lambda one: not one.record.pid):
            if kept.record.over:
                continue
            name, record, process = kept.order.id, kept.record, None
            if record.pid:
                process = self._children.adopt(record.pid, record.born_ticks)
            self._supervise(kept, process)
            self._supervisor.retire(name, kept.draining)
        for kept in adopted:
            if kept.stop_by is not None:
                self._stops_with(kept, 0.0)
        self._instances.note()
