"""What there is, with what was asked for counted as done: between a call and the runtime's next word nothing is asked
for twice."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from deploy.change.types import Actual
from deploy.runtime.protocol import Node, Observed, Order, Phase
from epd_serve.roles import Role

UNSEEN_S = 20.0
"""One that was started and has not been seen for so long has gone with its node."""


class Overlay:
    """Attributes:
    instances: as the runtime saw them last; None before its first word.
    started: that were started and not seen yet, and when. flipped: ids that were, and their role has not been seen.
    leaving, emptying: waits for an instance to be quiet, or empty, by id. stopping: that are being stopped.
    unwanted: ids that are to be replaced although their like is wanted, one after another.
    """

    def __init__(self, unwanted: Sequence[str] = ()) -> None:
        self.nodes: tuple[Node, ...] = ()
        self.instances: tuple[Observed, ...] | None = None
        self.started: dict[str, tuple[Observed, float]] = {}
        self.flipped: dict[str, Role] = {}
        self.leaving: dict[str, asyncio.Task[None]] = {}
        self.emptying: dict[str, asyncio.Task[None]] = {}
        self.stopping: dict[str, asyncio.Task[None]] = {}
        self.unwanted = tuple(unwanted)

    def take_in(self, instances: tuple[Observed, ...]) -> list[str]:
        """What the runtime says now. Returns the ids of those whose flip has been seen by it."""
        self.instances = instances
        there = {one.order.id: one for one in instances}
        for name in self.started.keys() & there.keys():
            del self.started[name]
        for waits in (self.emptying, self.leaving):
            for name in waits.keys() - there.keys():
                waits.pop(name).cancel()
        for name in self.stopping.keys() - there.keys():
            del self.stopping[name]
        self.unwanted = tuple(name for name in self.unwanted if name in there)
        done = [name for name, role in self.flipped.items() if name not in there or _role(there[name]) is role]
        for name in done:
            del self.flipped[name]
        return [name for name in done if name in there]

    def actual(self, unwanted: Sequence[str] = (), *, paused: bool) -> Actual:
        """For the rules.

        Args:
            unwanted: ids beside the one that is being replaced that are taken for something nobody wants.
        """
        now = time.monotonic()
        started = {name: one for name, (one, since) in self.started.items() if now < since + UNSEEN_S}
        there = {**started, **{one.order.id: self._as_asked(one) for one in self.instances or ()}}
        for name in {*self.unwanted[:1], *unwanted} & there.keys():
            spec = there[name].order.spec
            order = Order(name, replace(spec, digest=f"{spec.digest}, unwanted"))
            there[name] = replace(there[name], order=order)
        return Actual(
            nodes=self.nodes,
            instances=tuple(there.values()),
            empty=frozenset(name for name, task in self.emptying.items() if _over(task)),
            leaving=frozenset(self.leaving),
            quiet=frozenset(name for name, task in self.leaving.items() if _over(task)),
            paused=paused,
        )

    def take_in_nodes(self, nodes: tuple[Node, ...]) -> None:
        """All there are. What was started on another is gone."""
        self.nodes = nodes
        there = {node.id for node in nodes}
        self.started = {name: one for name, one in self.started.items() if one[0].order.spec.node in there}

    def cancel(self) -> None:
        for task in (*self.leaving.values(), *self.emptying.values(), *self.stopping.values()):
            task.cancel()

    def _as_asked(self, one: Observed) -> Observed:
        name = one.order.id
        if name in self.stopping:
            return replace(one, phase=Phase.STOPPING)
        if name in self.emptying and one.phase is not Phase.STOPPING:  # also one that has ended meanwhile
            return replace(one, phase=Phase.DRAINING, over=False)
        if name in self.flipped:
            return replace(one, order=Order(name, replace(one.order.spec, role=self.flipped[name])))
        return one


def _role(one: Observed) -> Role:
    return one.order.spec.role


def _over(task: asyncio.Task[None]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is None)
