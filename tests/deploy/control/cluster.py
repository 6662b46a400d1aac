"""A deployment on several nodes, in memory: nodes die, come and fall silent, and so does its controller."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from pathlib import Path

from deploy.change.limits import kinds
from deploy.control.aim import Aim
from deploy.control.changes import Deadlines, Journal
from deploy.control.controller import Controller
from deploy.control.reconciler import Reconciler
from deploy.follow.switch import Switch
from deploy.options.config import DeployConfig
from deploy.plan.blueprint import draw
from deploy.plan.machines import Machine, Machines
from deploy.runtime.leases import Place
from deploy.runtime.protocol import Node, Observed, Order, Phase
from epd_serve.errors import ConfigError, EpdError
from epd_serve.roles import Role
from npu_ops.discovery import DeviceInventory
from tests.deploy.control.world import FakeDoors, FakeRuntime, FileState
from tests.deploy.fake_leases import FakeLeases
from tests.waiting import until

QUICK = Deadlines(
    start_s=60.0, drain_s=60.0, call_s=0.2, retry_s=0.01, look_s=0.01, again_s=0.02, again_max_s=0.1, place_s=0.5
)


class FakeNodes(FakeRuntime):
    """Of several nodes. Holds each call against what none may do."""

    def __init__(self, leases: FakeLeases) -> None:
        super().__init__()
        self.leases = leases
        self.silent: set[str] = set()
        self.start_s: dict[str, dict[Role, float]] = {}
        self.told: tuple[Observed, ...] = ()
        self.wanted: Callable[[], frozenset[Role]] = frozenset
        self.broken: list[str] = []
        leases.gives_back = self._given_back

    async def nodes(self) -> tuple[Node, ...]:
        return tuple(
            Node(name, "cpu", tuple(range(count)), start_s=self.start_s.get(name, {}))
            for name, count in self.leases.nodes.items()
        )

    async def start(self, order: Order) -> None:
        spec = order.spec
        if spec.node not in self.leases.nodes:
            raise ConfigError(f"there is no node {spec.node}")
        self._reach(spec.node)
        if not self.leases.holds(spec.node, spec.devices):
            self.broken.append(f"{order.id} is started where nothing is leased")
        await super().start(order)

    async def drain(self, id: str) -> None:
        if (one := self.there.get(id)) is not None:
            self._reach(one.order.spec.node)
            if lost := (self._served() - self._served(but=id)) & kinds(self.wanted()):
                self.broken.append(f"draining {id} takes the last path of {sorted(lost)}")
            await super().drain(id)

    async def stop(self, id: str, grace_s: float) -> None:
        if (one := self.there.get(id)) is not None:
            self._reach(one.order.spec.node)
        await super().stop(id, grace_s)

    async def watch(self) -> AsyncIterator[tuple[Observed, ...]]:
        async for items in super().watch():
            self.told = tuple(
                replace(one, phase=Phase.DOWN, reason=f"node {one.order.spec.node} is silent")
                if one.order.spec.node in self.silent
                else one
                for one in items
            )
            yield self.told

    def dies(self, node: str) -> None:
        self.silent.discard(node)
        for name in [name for name, one in self.there.items() if one.order.spec.node == node]:
            del self.there[name]
        self.changed.set()

    def _given_back(self, place: Place) -> None:
        for one in self.there.values():
            spec = one.order.spec
            if spec.node == place.node and set(spec.devices) & set(place.devices):
                self.broken.append(f"{one.order.id} is there, and its devices are given back")

    def _reach(self, node: str) -> None:
        if node in self.silent:
            raise EpdError(f"node {node} is silent")

    def _served(self, but: str = "") -> frozenset[str]:
        """Really, or as the controller must believe."""
        draining = {name for name, one in self.there.items() if one.phase is Phase.DRAINING}
        those = (*self.told, *self.there.values())
        up = (one for one in those if one.phase is Phase.UP and one.order.id not in {*draining, but})
        return kinds(one.order.spec.role for one in up)


class Cluster:
    """Simulated stages, never started. Each life of the controller takes in what is there.

    Attributes:
        reconciler, controller, aim: of the present life.
    """

    def __init__(self, folder: Path, layout: str, nodes: Mapping[str, int], deadlines: Deadlines = QUICK) -> None:
        self.leases = FakeLeases(nodes)
        self.runtime = FakeNodes(self.leases)
        self.doors = FakeDoors()
        self.said: list[str] = []
        self.lives = 0
        self._names = itertools.count()
        self._notes = FileState(folder)
        self._journal = Journal(self._notes)
        self._layout = layout
        self._deadlines = deadlines
        self._blueprint = draw(DeployConfig(layout=layout, engine="sim", runtime="ray"), machines=self._machines())
        self._life: asyncio.Task[None] | None = None
        self._over = False
        self.crashed: Exception | None = None

    async def begin(self) -> None:
        """The first life, until it is killed or fails."""
        await self._one_life()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        reports = asyncio.create_task(self._report())
        lives = asyncio.create_task(self._live())
        try:
            await until(lambda: self.lives or self.crashed)
            yield
        finally:
            self._over = True
            if self._life is not None:
                self._life.cancel()
            for task in (lives, reports):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    def kill(self) -> None:
        """The controller; another one follows."""
        assert self._life is not None
        self._life.cancel()

    def dies(self, node: str) -> None:
        """Its instances end with it."""
        self.runtime.dies(node)
        self.leases.dies(node)
        self._nodes_change()

    def comes(self, devices: int) -> str:
        """A node that there has never been. Returns its name."""
        name = f"n{next(self._names)}"
        self.leases.comes(name, devices)
        self._nodes_change()
        return name

    def up(self) -> dict[str, str]:
        """Node by instance."""
        there = self.runtime.there.items()
        return {name: one.order.spec.node for name, one in sorted(there) if one.phase is Phase.UP}

    def lacking(self) -> str:
        """What is not as it is wanted to be; "" for nothing."""
        if self.crashed is not None:
            raise self.crashed
        assert not self.runtime.broken, self.runtime.broken
        wanted = self.reconciler.wanted
        there = [one.order.spec for one in self.runtime.there.values() if one.phase is Phase.UP]
        if wanted.waiting or self.reconciler.changes.present is not None:
            return f"waits for {wanted.waits}, {self.reconciler.changes.present}"
        if sorted(map(hash, there)) != sorted(map(hash, wanted.specs)) or len(there) != len(self.runtime.there):
            return f"there are {sorted(self.runtime.there)} for {wanted.layout}"
        return ""

    async def whole(self) -> None:
        """Until all is as it is wanted, and what is leased is what is used."""
        await until(lambda: not self.lacking())
        await until(self._leases_fit)

    async def _leases_fit(self) -> bool:
        used = {(spec.node, device) for spec in self.reconciler.wanted.specs for device in spec.devices}
        places = await self.leases.places()
        return used == {(one.node, device) for one in places for device in one.devices}

    async def _live(self) -> None:
        while True:
            self._life = asyncio.create_task(self._one_life())
            try:
                await self._life
            except asyncio.CancelledError:
                if self._over:
                    raise
            except Exception as error:  # noqa: BLE001 - told to whoever waits
                self.crashed = error
                return

    async def _one_life(self) -> None:
        self.doors.given_nothing.clear()
        self.aim = Aim(self._blueprint, self.leases)
        self._nodes_change()
        record, previous = self._journal.read(), None
        if record is None:
            wanted = await self.aim(self._layout, ())
        else:
            running = [one.order.spec for one in await anext(self.runtime.watch())]
            wanted = await self.aim.again(record.layouts[-1], running)
            if record.change is not None and not record.change.state.over:
                previous = await self.aim.again(record.change.before, running)
        self.reconciler = Reconciler(
            self.runtime,
            self.doors,
            self._journal,
            wanted,
            deadlines=self._deadlines,
            say=self.said.append,
            record=record,
            previous=previous,
        )
        self.runtime.wanted = lambda: self.reconciler.wanted.roles
        self.controller = Controller(
            "epd", self.reconciler, self.doors, self.aim, _no_parts, _no_options, Switch("off", self._notes)
        )
        self.lives += 1
        async with asyncio.TaskGroup() as group:
            group.create_task(self.reconciler.run())
            group.create_task(self.controller.keep_places())

    def _nodes_change(self) -> None:
        if self.leases.nodes:
            self.aim.machines = self._machines()

    def _machines(self) -> Machines:
        return Machines.of(
            Machine(name, DeviceInventory("cpu", tuple(range(count))), (), doubts=())
            for name, count in self.leases.nodes.items()
        )

    async def _report(self) -> None:
        while True:
            self.doors.report()
            await asyncio.sleep(0.005)


async def _no_parts() -> dict[str, int]:
    return {}


async def _no_options(options: object) -> None:
    raise ConfigError(f"there are no options {options}")
