"""A world in which changes are carried out: instances start, drain and stop when chance lets them, fail and die."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from deploy.change.limits import required, served, shortage
from deploy.change.place import place
from deploy.change.types import Action, Actual, Drain, Flip, Leave, Pause, Resume, Start, Stop, Wanted, carried_out
from deploy.change.wave import reached, wave
from deploy.plan.machines import Machine, Machines
from deploy.runtime.protocol import Node, Observed, Order, Phase, Spec, device_memory
from epd_serve.layout_parser import parse
from epd_serve.placement import lower
from epd_serve.roles import Role
from npu_ops.discovery import DeviceInventory

GIB = 1 << 30
NEEDS_GIB = {"E": 2, "P": 6, "D": 6, "EP": 7, "PD": 7, "EPD": 8}


def wanted(layout: str, *, pool: int = 8, running: Iterable[Spec] = (), both: bool = False, **needs_gib: int) -> Wanted:
    """`needs_gib`: by role, where it is not the usual."""
    parsed = parse(layout)
    devices = [device for group in place(parsed, range(pool), list(running)) for device in group]
    sizes = {**NEEDS_GIB, **needs_gib}
    specs = tuple(
        Spec(
            role=plan.role,
            devices=plan.devices,
            digest="P|D" if both and plan.role in (Role.P, Role.D) else plan.role.value,
            both=both and plan.role in (Role.P, Role.D),
            needs={device_memory(device): sizes[plan.role.value] * GIB for device in plan.devices},
            featured=plan.role.sends_features or plan.role.takes_features,
        )
        for plan in lower(parsed, devices)
    )
    return Wanted(layout, specs)


def node(devices: int = 8, *, gib: int | None = None, kind: str = "cpu") -> Node:
    """`gib`: of each device; None for as much as anybody asks for."""
    room = {device_memory(device): gib * GIB for device in range(devices)} if gib is not None else {}
    return Node("local", kind, tuple(range(devices)), room)


def up(wanted: Wanted) -> tuple[Observed, ...]:
    """All of it, as it is once it runs."""
    ids = {role: iter(range(1000)) for role in Role}
    orders = [Order(f"{spec.role.value}{next(ids[spec.role])}", spec) for spec in wanted.specs]
    return tuple(Observed(order, Phase.UP, ever_up=True) for order in orders)


@dataclass
class World:
    """Attributes:
    actual: what there is now. asked: every action, in order.
    fails: a start may end before it answers, and one that runs may die and come back.
    """

    chance: random.Random
    actual: Actual
    fails: bool = False
    asked: list[Action] = field(default_factory=list)

    def reach(self, wanted: Wanted, *, may_pause: bool = False, most: int = 400) -> bool:
        """Whether it is reached within so many turns; False where it is refused midway."""
        self.actual = replace(self.actual, required=required(wanted, self.actual))
        for _ in range(most):
            now = wave(wanted, self.actual, may_pause=may_pause)
            if not isinstance(now, tuple):
                return False
            for action in now:
                self.carry_out(action)
            if not now and reached(wanted, self.actual):
                return True
            self.something_happens()
        raise AssertionError(f"not reached: {self.asked}")

    def carry_out(self, action: Action) -> None:
        """And hold it against what no action may do."""
        before = self.served()
        if isinstance(action, Start) and action.id not in {one.order.id for one in self.actual.instances}:
            assert shortage(action.spec, self.actual.instances, self.actual) is None, f"no room for {action}"
        self.actual = carried_out(action, self.actual)
        self.asked.append(action)
        if isinstance(action, Drain | Leave | Flip | Stop) and not self.actual.paused:
            lost = (before & self.actual.required) - self.served()
            assert not lost, f"{action} takes the last path of {lost}"

    def loses(self, node: str) -> None:
        """The node dies, and all on it."""
        there = tuple(one for one in self.actual.instances if one.order.spec.node != node)
        ids = frozenset(one.order.id for one in there)
        self.actual = replace(
            self.actual,
            instances=there,
            nodes=tuple(one for one in self.actual.nodes if one.id != node),
            empty=self.actual.empty & ids,
            leaving=self.actual.leaving & ids,
            quiet=self.actual.quiet & ids,
        )

    def falls_silent(self, node: str) -> None:
        """Nobody knows how its instances are. They are there again when it speaks, one after another."""
        for one in self.actual.instances:
            if one.order.spec.node == node and one.phase is Phase.UP:
                self._put(one, Phase.DOWN)

    def served(self) -> frozenset[str]:
        return served(self.actual.instances, self.actual.leaving)

    def something_happens(self) -> None:
        """To one instance for which something may."""
        moving = [one for one in self.actual.instances if one.phase is not Phase.UP and not _ended(one)]
        if self.fails and self.chance.random() < 0.1:
            moving = [one for one in self.actual.instances if one.phase is Phase.UP]
        leaving = sorted(self.actual.leaving - self.actual.quiet)
        if leaving and (not moving or self.chance.random() < 0.5):
            self.actual = replace(self.actual, quiet=self.actual.quiet | {self.chance.choice(leaving)})
        elif moving:
            self._next(self.chance.choice(moving))

    def _next(self, one: Observed) -> None:
        name = one.order.id
        if one.phase is Phase.STOPPING:
            self._put(one, None)
        elif one.phase is Phase.DRAINING:
            self.actual = replace(self.actual, empty=self.actual.empty | {name})
        elif one.phase is Phase.UP or (one.phase is Phase.STARTING and self.fails and self.chance.random() < 0.2):
            self._put(replace(one, over=not one.ever_up), Phase.DOWN)
        else:
            self._put(replace(one, ever_up=True), Phase.UP)

    def _put(self, one: Observed, phase: Phase | None) -> None:
        others = {other.order.id: other for other in self.actual.instances}
        del others[one.order.id]
        if phase is not None:
            others[one.order.id] = replace(one, phase=phase)
        self.actual = replace(self.actual, instances=tuple(others.values()))


def _ended(one: Observed) -> bool:
    return one.over and one.phase is Phase.DOWN


def kinds_of(actions: Sequence[Action]) -> list[str]:
    """`Drain D0`, and so on."""
    return [
        type(action).__name__ if isinstance(action, Pause | Resume) else f"{type(action).__name__} {action.id}"
        for action in actions
    ]


class Nodes:
    """Several nodes with so many devices each, of which some have died. `gib`: of each device, as of `node`."""

    def __init__(self, *sizes: int, gib: int | None = None) -> None:
        self._gib = gib
        self._machines = Machines(
            tuple(Machine(f"n{at}", DeviceInventory("cpu", tuple(range(size)))) for at, size in enumerate((*sizes, 64)))
        )
        self.ids = [machine.id for machine in self._machines.nodes[:-1]]  # the last one is not there
        self.dead: set[str] = set()

    def alive(self) -> tuple[Node, ...]:
        nodes = (self._machines.at(name) for name in self.ids if name not in self.dead)
        return tuple(replace(node(len(machine.inventory.ids), gib=self._gib), id=machine.id) for machine in nodes)

    def wanted(self, layout: str, running: Iterable[Spec] = ()) -> Wanted:
        """On those that live, beside those that run there; who finds no room waits."""
        parsed = parse(layout)
        pool = [device for node in self.alive() for device in self._machines.numbered(node.id, node.devices)]
        stay = [replace(one, devices=self._machines.numbered(one.node, one.devices)) for one in running]
        nowhere = iter(self._machines.numbered(self._machines.nodes[-1].id, range(64)))
        widths = [group.tp for group in parsed.groups for _ in range(group.repeat)]
        found = zip(place(parsed, pool, stay), widths, strict=True)
        devices = [one for some, tp in found for one in some or [next(nowhere) for _ in range(tp)]]
        specs = [self._spec(plan.role, plan.devices) for plan in lower(parsed, devices)]
        there = {node.id for node in self.alive()}
        placed, waiting = (tuple(one for one in specs if (one.node in there) is is_there) for is_there in (True, False))
        return Wanted(layout, placed, waiting)

    def _spec(self, role: Role, devices: tuple[int, ...]) -> Spec:
        there, numbers = self._machines.local(devices)
        needs = {device_memory(device): NEEDS_GIB[role.value] * GIB for device in numbers}
        return Spec(role=role, devices=numbers, digest=role.value, node=there, needs=needs)
