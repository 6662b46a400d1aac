"""A deployment in memory: a runtime whose instances do as they are told, or not, and its front doors."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from deploy.change.place import place
from deploy.change.types import Wanted, on_cores
from deploy.control.changes import Deadlines, Journal, State
from deploy.control.reconciler import Reconciler
from deploy.front.occupancy import until_empty, until_quiet
from deploy.plan.core_plan import plan_cores
from deploy.runtime.protocol import Node, Observed, Order, Phase, Spec
from epd_serve.errors import ConfigError, EpdError
from epd_serve.instances import Instance
from epd_serve.layout_parser import parse
from epd_serve.placement import InstancePlan, lower
from epd_serve.roles import Role
from epd_serve.wire import KvReport, StageReport, StoreReport
from npu_ops.core_sets import core_sets
from proxy.registry.instance_state import InstanceView, Work
from proxy.registry.table import InstanceTable

MIB = 1 << 20


CORES = 4
"""Of each virtual device."""


def wanted(
    layout: str, *, running: Sequence[Spec] = (), host_bytes: int = 0, both: bool = False, core_share: str = ""
) -> Wanted:
    """The instances of a layout, on the devices of those that run as far as can be. Each takes so much of the host's
    memory. With `both`, P and D have both halves of the connector."""
    parsed = parse(layout)
    pool = range(parsed.device_count + sum(len(spec.devices) for spec in running))
    plans = lower(parsed, [device for group in place(parsed, pool, running) for device in group])
    if core_share:
        sets = core_sets(len(pool), range(CORES * len(pool)))
        orders = plan_cores(core_share, plans, "cpu", sets, None)
        plans, cores = orders.plans, {name: order.cores for name, order in orders.orders.items()}
    else:
        cores = {}
    specs = tuple(_spec(plan, cores.get(plan.id, ()), host_bytes, both) for plan in plans)
    return Wanted(layout, specs, core_share=core_share)


def _spec(plan: InstancePlan, cores: tuple[int, ...], host_bytes: int, both: bool) -> Spec:
    role = plan.role
    switches = both and role in (Role.P, Role.D)
    needs = {"host memory": host_bytes} if host_bytes else {}
    digest = "P|D" if switches else role.value
    return Spec(role, plan.devices, digest, both=switches, needs=needs, plan=plan, cores=cores)


@dataclass
class FakeRuntime:
    """Instances are up as soon as they are started, unless `fate` says otherwise of one: `fails`, `hangs` or `up`.

    Attributes:
        calls: what was asked for, in order. after_call: called when one has taken effect, before it is answered.
        lost: calls whose next answer is lost. disobeys: ids of those that stay on their cores.
    """

    room_bytes: int | None = None
    fate: Callable[[str], str] = lambda name: "up"
    calls: list[str] = field(default_factory=list)
    after_call: Callable[[], None] = lambda: None
    lost: set[str] = field(default_factory=set)
    disobeys: set[str] = field(default_factory=set)
    there: dict[str, Observed] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    lives: int = 0

    async def nodes(self) -> tuple[Node, ...]:
        room = {"host memory": self.room_bytes} if self.room_bytes is not None else {}
        return (Node("local", "cpu", tuple(range(64)), room),)

    async def start(self, order: Order) -> None:
        self.calls.append(f"start {order.id}")
        one = self.there.get(order.id)
        if one is not None and one.phase is Phase.DRAINING:
            self._set(replace(one, order=order, phase=Phase.UP))
        elif one is None:
            self._set(Observed(order, Phase.STARTING, self._instance(order)))
            fate = self.fate(order.id)
            if fate == "up":
                asyncio.get_running_loop().call_soon(self.say_up, order.id)
            elif fate == "fails":
                self.fails(order.id)
        self._lose(f"start {order.id}")

    async def flip(self, id: str, role: Role) -> None:
        self.calls.append(f"flip {id} {role.value}")
        one = self.there[id]
        order = Order(id, replace(one.order.spec, role=role))
        assert one.instance is not None
        self._set(replace(one, order=order, instance=replace(one.instance, role=role)))
        self._lose(f"flip {id}")

    async def share(self, order: Order) -> None:
        self.calls.append(f"share {order.id} {','.join(map(str, order.spec.cores))}")
        if order.id in self.disobeys:
            raise ConfigError(f"{order.id} does not compute on other cores")
        self._set(on_cores(self.there[order.id], order.spec))
        self._lose(f"share {order.id}")

    async def drain(self, id: str) -> None:
        self.calls.append(f"drain {id}")
        self._set(replace(self.there[id], phase=Phase.DRAINING))
        self._lose(f"drain {id}")

    async def stop(self, id: str, grace_s: float) -> None:
        self.calls.append(f"stop {id}")
        self.there.pop(id, None)
        self.changed.set()
        self._lose(f"stop {id}")

    async def watch(self) -> AsyncIterator[tuple[Observed, ...]]:
        while True:
            self.changed.clear()
            yield tuple(self.there.values())
            await self.changed.wait()

    def say_up(self, name: str) -> None:
        if name in self.there:
            self._set(replace(self.there[name], phase=Phase.UP, ever_up=True))

    def fails(self, name: str) -> None:
        """Its first start does."""
        self._set(replace(self.there[name], phase=Phase.DOWN, reason="no luck", over=True))

    def say_down(self, name: str, reason: str = "killed") -> None:
        self._set(replace(self.there[name], phase=Phase.DOWN, reason=reason))

    def _set(self, one: Observed) -> None:
        self.there[one.order.id] = one
        self.changed.set()

    def _instance(self, order: Order) -> Instance:
        self.lives += 1
        sends = ("ipc://news",) if order.spec.role.sends_kv or order.spec.both else ()
        return Instance(
            order.id,
            order.spec.role,
            "http://127.0.0.1:1",
            f"life{self.lives}",
            kv_news=sends,
            devices=order.spec.devices,
        )

    def _lose(self, call: str) -> None:
        self.after_call()
        if call in self.lost:
            self.lost.discard(call)
            raise ConnectionError(f"{call}: the answer was lost")


class FakeDoors:
    """Front doors as one table. Stages report at once what `busy` and `open_transfers` say of them."""

    def __init__(self) -> None:
        self.table = InstanceTable(link_grace_s=0.0)
        self.given_nothing: set[str] = set()
        self.roles: frozenset[Role] = frozenset()
        self.paused: list[float] = []
        self.resumed = 0
        self.busy: dict[str, int] = {}
        self.item_budgets: dict[str, int] = {}
        self.open_transfers: dict[str, int] = {}
        self.restarts = 0
        self.fails = ""  # why front doors cannot be replaced
        self.pids = {"front.0": 1}
        self.replacing = False
        self.room_s = math.inf  # until the queues are full in a pause
        self._there: dict[str, Observed] = {}
        self._seq = 0

    def publish(self, instances: Iterable[Observed], wanted: Iterable[Role]) -> None:
        self.roles = frozenset(wanted)
        now = {one.order.id: one for one in instances if one.instance is not None}
        for name in self._there.keys() - now.keys():
            self.table.remove(name)
            self.given_nothing.discard(name)
        for name, one in now.items():
            if self._there.get(name) != one:
                assert one.instance is not None
                self.table.apply(one.instance, up=False)
                if one.phase in (Phase.UP, Phase.DRAINING):
                    self.table.mark_up(name)
                else:
                    self.table.mark_down(name, one.reason)
        self._there = now

    def drain(self, id: str, draining: bool = True) -> None:
        if draining:
            self.given_nothing.add(id)
        else:
            self.given_nothing.discard(id)

    def pause(self, seconds: float) -> None:
        if seconds:
            self.paused.append(seconds)
        else:
            self.resumed += 1

    async def pausable_s(self) -> float:
        return self.room_s

    async def seen(self) -> None:
        await asyncio.sleep(0)

    async def until_empty(self, id: str) -> None:
        await until_empty(self.table, self.seen, id)

    async def until_quiet(self, id: str) -> None:
        await until_quiet(self.table, self.seen, id)

    async def restart(self) -> None:
        if self.fails:
            raise EpdError(self.fails)
        self.restarts += 1

    def report(self) -> None:
        """Every stage says how it is now."""
        self._seq += 1
        for view in self.table.snapshot():
            one = view.instance
            running, items = self.busy.get(one.id, 0), self.item_budgets.get(one.id, 0)
            report = StageReport(one.id, one.incarnation, self._seq, running=running, item_budget=items)
            self.table.report(report)
            self.table.report(StoreReport(one.id, one.incarnation, 0, 0, 0))
            if one.kv_news:
                transfers = self.open_transfers.get(one.id, 0)
                self.table.report(KvReport(one.id, one.incarnation, 0, "", 0.0, [], open=transfers))

    def view(self, name: str) -> InstanceView:
        return next(view for view in self.table.snapshot() if view.instance.id == name)

    def give(self, name: str, work: Work = Work.DECODE) -> object:
        """A request that holds the instance until its `release`."""
        return self.table.acquire(name, work)


class FileState:
    """A `deploy.host.state.State` of files, which outlive their writer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, name: str) -> bytes | None:
        path = self._folder / name
        return path.read_bytes() if path.exists() else None

    def write(self, name: str, content: bytes) -> None:
        (self._folder / name).write_bytes(content)

    async def kept(self) -> None:
        """It is."""


QUICK = Deadlines(start_s=60.0, drain_s=60.0, retry_s=0.01, look_s=0.01, again_s=0.02)


class World:
    """One deployment, from its start on."""

    def __init__(self, folder: Path, layout: str, deadlines: Deadlines = QUICK, **options: object) -> None:
        self.runtime, self.doors = FakeRuntime(), FakeDoors()
        self.journal = Journal(FileState(folder))
        self.said: list[str] = []
        self.options = options
        self.deadlines = deadlines
        self.reconciler = self._made(self._wanted(layout))

    def follow(self) -> None:
        """Another controller in place of one that has died: it knows what is written, and what runs."""
        self.doors.given_nothing.clear()  # told by it, and not yet by the next one
        record = self.journal.read()
        if record is None:
            self.reconciler = self._made(self.reconciler.wanted)
        else:
            before = record.change.before if record.change is not None and not record.change.state.over else ""
            previous = self._wanted(before) if before else None
            self.reconciler = self._made(self._wanted(record.layouts[-1]), record=record, previous=previous)

    def _made(self, target: Wanted, **more: Any) -> Reconciler:
        return Reconciler(
            self.runtime, self.doors, self.journal, target, deadlines=self.deadlines, say=self.said.append, **more
        )

    def _wanted(self, layout: str) -> Wanted:
        running = [one.order.spec for one in self.runtime.there.values()]
        return wanted(layout, running=running, **self.options)  # type: ignore[arg-type]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.reconciler.run())
        reports = asyncio.create_task(self._report())
        try:
            yield
        finally:
            for one in (task, reports):
                one.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await one

    async def _report(self) -> None:
        while True:
            self.doors.report()
            await asyncio.sleep(0.005)

    def up(self) -> list[str]:
        return sorted(name for name, one in self.runtime.there.items() if one.phase is Phase.UP)

    async def over(self) -> None:
        async with asyncio.timeout(60):
            await self.reconciler.changes.over()

    def begin(self, layout: str, **more: object) -> None:
        self.reconciler.begin("relayout", self._wanted(layout), **more)  # type: ignore[arg-type]

    async def wants(self, layout: str, **more: object) -> None:
        self.begin(layout, **more)
        await self.over()

    def last(self) -> State:
        return self.reconciler.changes.past[-1].state
