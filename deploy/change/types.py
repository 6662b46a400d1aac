"""The words of a change: what is wanted, what is there, what may be done, what is short."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from deploy.runtime.protocol import Node, Observed, Order, Phase, Spec
from epd_serve.roles import Role

Kind = str
"""A kind of request that a layout serves: `text` or `media` (`deploy.change.limits`)."""


@dataclass(frozen=True)
class Wanted:
    """A layout as text, and its instances.

    Attributes:
        specs: of those that have a place. waiting: of those that have none now. waits: what these wait for.
        core_share: by which they share devices, as `--core-share` has it.
    """

    layout: str
    specs: tuple[Spec, ...]
    waiting: tuple[Spec, ...] = ()
    waits: str = ""
    core_share: str = ""

    @property
    def every(self) -> tuple[Spec, ...]:
        return (*self.specs, *self.waiting)

    @property
    def roles(self) -> frozenset[Role]:
        return frozenset(spec.role for spec in self.every)


@dataclass(frozen=True)
class Actual:
    """What there is.

    Attributes:
        empty: ids of draining instances on which nothing is under way, or whose time to drain is over.
        leaving: ids of P with both halves that are given nothing new, because they are to be D.
        quiet: those of them on which no prefill is under way and no KV has yet to leave.
        required: kinds of requests that must not lose their last path (`limits.required`).
        paused: new requests wait.
    """

    nodes: tuple[Node, ...]
    instances: tuple[Observed, ...]
    empty: frozenset[str] = frozenset()
    leaving: frozenset[str] = frozenset()
    quiet: frozenset[str] = frozenset()
    required: frozenset[Kind] = frozenset()
    paused: bool = False


@dataclass(frozen=True)
class Start:
    id: str
    spec: Spec


@dataclass(frozen=True)
class Flip:
    """An instance with both halves takes the other part. A P leaves first, and flips when it is quiet."""

    id: str
    role: Role


@dataclass(frozen=True)
class Share:
    """An instance computes on the cores of this spec from now on, without a restart."""

    id: str
    spec: Spec


@dataclass(frozen=True)
class Leave:
    """A P with both halves gets nothing new: it will be a D once it is quiet."""

    id: str


@dataclass(frozen=True)
class Drain:
    id: str


@dataclass(frozen=True)
class Stop:
    id: str


@dataclass(frozen=True)
class Pause:
    """New requests wait at the front doors."""


@dataclass(frozen=True)
class Resume:
    pass


Action = Start | Flip | Share | Leave | Drain | Stop | Pause | Resume


def in_role(one: Observed, role: Role) -> Observed:
    return replace(one, order=Order(one.order.id, replace(one.order.spec, role=role)))


def on_cores(one: Observed, spec: Spec) -> Observed:
    return replace(one, order=Order(one.order.id, replace(spec, role=one.order.spec.role)))


def carried_out(action: Action, actual: Actual) -> Actual:
    """The world as it is right after an action was begun."""
    there = {one.order.id: one for one in actual.instances}
    match action:
        case Pause() | Resume():
            actual = replace(actual, paused=isinstance(action, Pause))
        case Leave(name):
            actual = replace(actual, leaving=actual.leaving | {name})
        case Flip(name, role):
            there[name] = in_role(there[name], role)
            actual = replace(actual, leaving=actual.leaving - {name}, quiet=actual.quiet - {name})
        case Share(name, spec):
            there[name] = on_cores(there[name], spec)
        case Start(name, spec):
            order = Order(name, spec)
            taken_back = name in there
            there[name] = (
                replace(there[name], order=order, phase=Phase.UP) if taken_back else Observed(order, Phase.STARTING)
            )
            actual = replace(actual, empty=actual.empty - {name})
        case Drain(name):
            there[name] = replace(there[name], phase=Phase.DRAINING)
        case Stop(name):
            there[name] = replace(there[name], phase=Phase.STOPPING)
    return replace(actual, instances=tuple(there.values()))


@dataclass(frozen=True)
class Shortage:
    """Why the wanted layout cannot be reached without taking something away.

    Attributes:
        what: a resource, or `last path`. where: node, or kind of request.
        needed: bytes, free: bytes; 0 for a path.
        blocks: ids of instances that would have to go first.
        pause_helps: it can be reached while new requests wait.
    """

    what: str
    where: str
    needed: int = 0
    free: int = 0
    blocks: tuple[str, ...] = ()
    pause_helps: bool = False


@dataclass(frozen=True)
class Plan:
    """Actions in an order that keeps the rules: those of a wave begin together, the next wave once they have ended."""

    waves: tuple[tuple[Action, ...], ...]

    @property
    def pauses(self) -> bool:
        return any(Pause() in wave for wave in self.waves)

    def seconds(self, start_s: Callable[[Spec], float | None], *, paused: bool = False) -> float | None:
        """How long it takes by experience, or how long of it new requests wait; None where a start has no precedent.

        Args:
            start_s: tells it of an instance.
        """
        total, counts = 0.0, not paused
        for wave in self.waves:
            counts = counts or Pause() in wave
            starts = [start_s(one.spec) for one in wave if isinstance(one, Start)] if counts else []
            known = [seconds for seconds in starts if seconds is not None]
            if len(known) < len(starts):
                return None
            total += max(known, default=0.0)
            counts = counts and not (paused and Resume() in wave)
        return total
