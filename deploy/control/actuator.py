"""The instances as the runtime sees them, with what was asked for counted as done: between a call and the runtime's
next word nothing is asked for twice. Tells the runtime and the front doors what the rules decide, and waits for its
end. What it asks of front doors is `Doors`; `deploy/front/doors.py` is the real thing."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from deploy.change.types import Action, Actual, Drain, Flip, Leave, Pause, Resume, Share, Start, Stop
from deploy.control.changes import Changes, Deadlines, Record
from deploy.front.occupancy import under_way
from deploy.runtime.protocol import Node, Observed, Order, Phase, Runtime
from epd_serve.roles import Role

if TYPE_CHECKING:
    from proxy.registry.table import InstanceTable


class Doors(Protocol):
    """All of a deployment's front doors as one."""

    @property
    def table(self) -> InstanceTable:
        """What requests hold of the instances, and what these report."""

    @property
    def pids(self) -> Mapping[str, int]:
        """Of the processes, by name."""

    @property
    def replacing(self) -> bool:
        """They are being replaced one by one."""

    def publish(self, instances: Iterable[Observed], wanted: Iterable[Role]) -> None:
        """All instances there are, and the roles of the wanted layout."""

    def drain(self, id: str, draining: bool = True) -> None:
        """Given nothing new until it is taken back; what is on it goes on."""

    def pause(self, seconds: float) -> None:
        """New requests wait, at most so long; 0: no longer."""

    async def pausable_s(self) -> float:
        """For how long new requests may wait, if they come as they do now, before any is refused."""

    async def seen(self) -> None:
        """Returns when every living front door acts on all that was said before the call."""

    async def until_empty(self, id: str) -> None:
        """Returns when nothing is under way on an instance that is given nothing new, or it has gone."""

    async def until_quiet(self, id: str) -> None:
        """Returns when no prefill is under way on it and no KV has yet to leave, or it has gone."""

    async def restart(self) -> None:
        """One after another: the next one serves before the old one leaves."""


UNSEEN_S = 20.0
"""One that was started and has not been seen for so long has gone with its node."""

logger = logging.getLogger(__name__)

Waits = dict[str, asyncio.Task[None]]
"""By instance."""


class Actuator:
    """In the reconciler's event loop.

    Args:
        changes: the one under way is told of requests that are cut off, and of pauses.
        wake: called when something has happened: time for another look.
        write: called when the end of a pause has become another one, and waited for before it is told.
        say: takes a line for the operator.
        record: what a controller before this one has left.

    Attributes:
        nodes: all there are. instances: as the runtime saw them last; None before its first word.
        unwanted: ids that are to be replaced although their like is wanted, one after another.
        paused_until: seconds since the epoch; 0 while requests do not wait.
    """

    def __init__(
        self,
        runtime: Runtime,
        doors: Doors,
        changes: Changes,
        deadlines: Deadlines,
        *,
        wake: Callable[[], None],
        write: Callable[[], Awaitable[None]],
        say: Callable[[str], None],
        record: Record,
    ) -> None:
        self._runtime = runtime
        self._doors = doors
        self._changes = changes
        self._deadlines = deadlines
        self._wake = wake
        self._write = write
        self._say = say
        self.nodes: tuple[Node, ...] = ()
        self.instances: tuple[Observed, ...] | None = None
        self.unwanted = record.unwanted
        self.paused_until = record.paused_until
        self._paused_at = time.monotonic()
        self._started: dict[str, tuple[Observed, float]] = {}  # not seen yet, and when
        self._flipped: dict[str, Role] = {}  # their role has not been seen
        self._leaving: Waits = {}
        self._emptying: Waits = {}
        self._stopping: Waits = {}

    # What there is.

    async def look(self) -> None:
        """Ask the runtime for its nodes again. What was started on another one is gone."""
        self.nodes = await self._runtime.nodes()
        there = {node.id for node in self.nodes}
        self._started = {name: one for name, one in self._started.items() if one[0].order.spec.node in there}

    def take_in(self, instances: tuple[Observed, ...], roles: Collection[Role]) -> None:
        """What the runtime says now: the front doors hear of it, the waits that it ends are ended.

        Args:
            roles: of the wanted layout.
        """
        first, self.instances = self.instances is None, instances
        there = {one.order.id: one for one in instances}
        for name in self._started.keys() & there.keys():
            del self._started[name]
        for waits in (self._emptying, self._leaving):
            for name in waits.keys() - there.keys():
                waits.pop(name).cancel()
        for name in self._stopping.keys() - there.keys():
            del self._stopping[name]
        self.unwanted = tuple(name for name in self.unwanted if name in there)
        self.publish(roles)
        if first and self.paused_s:  # in the same roster, or they would go on meanwhile
            self._doors.pause(self.paused_s)
        for name, role in tuple(self._flipped.items()):
            if name not in there or there[name].order.spec.role is role:
                del self._flipped[name]
                if name in there:
                    self._doors.drain(name, False)
        for name, one in there.items():
            if one.phase is Phase.DRAINING:
                self._empty(name)  # also where a controller before this one has asked for it
            if one.phase is Phase.DOWN and name in self._emptying:  # it has ended by itself
                self._emptying[name].cancel()
        self._wake()

    def publish(self, roles: Collection[Role]) -> None:
        """Once there is a word of the runtime; before it nobody knows what there is."""
        if self.instances is not None:
            self._doors.publish(self.instances, roles)

    def actual(self, unwanted: Sequence[str] = ()) -> Actual:
        """For the rules.

        Args:
            unwanted: ids beside the one that is being replaced that are taken for something nobody wants.
        """
        now = time.monotonic()
        there = {name: one for name, (one, since) in self._started.items() if now < since + UNSEEN_S}
        there |= {one.order.id: self._as_asked(one) for one in self.instances or ()}
        for name in {*self.unwanted[:1], *unwanted} & there.keys():
            order = there[name].order
            spec = replace(order.spec, digest=f"{order.spec.digest}, unwanted")
            there[name] = replace(there[name], order=Order(name, spec))
        return Actual(
            nodes=self.nodes,
            instances=tuple(there.values()),
            empty=_over(self._emptying),
            leaving=frozenset(self._leaving),
            quiet=_over(self._leaving),
            paused=self.paused,
        )

    def _as_asked(self, one: Observed) -> Observed:
        name = one.order.id
        if name in self._stopping:
            return replace(one, phase=Phase.STOPPING)
        if name in self._emptying and one.phase is not Phase.STOPPING:  # also one that has ended meanwhile
            return replace(one, phase=Phase.DRAINING, over=False)
        if name in self._flipped:
            return replace(one, order=Order(name, replace(one.order.spec, role=self._flipped[name])))
        return one

    @property
    def unseen(self) -> Collection[str]:
        """Whose flip the runtime has accepted and not shown yet."""
        return self._flipped.keys()

    def not_quiet(self) -> list[str]:
        """Who is to leave and has prefills that have yet to end."""
        return [name for name, task in self._leaving.items() if not task.done()]

    @property
    def paused(self) -> bool:
        return self.paused_until > 0

    @property
    def paused_s(self) -> float:
        """For how long new requests still wait; 0 while they do not."""
        return max(0.0, self.paused_until - time.time()) if self.paused else 0.0

    # What is done.

    async def do(self, action: Action) -> None:
        """Returns when it is accepted; may be asked for again.

        Raises:
            ConfigError: the runtime refuses it. TimeoutError and others: nobody knows whether it has taken effect.
        """
        async with asyncio.timeout(self._deadlines.call_s):
            match action:
                case Start(name, spec):
                    await self._start(Order(name, spec))
                case Drain(name):
                    await self._runtime.drain(name)
                    self._empty(name)
                case Stop(name):
                    if name not in self._stopping:
                        self._stopping[name] = asyncio.create_task(self._stop(name), name=f"stop {name}")
                case Leave(name):
                    self._doors.drain(name)
                    self._leaving[name] = self._awaited(self._doors.until_quiet(name))
                case Flip(name, role):
                    await self._runtime.flip(name, role)
                    if name in self._leaving:
                        self._leaving.pop(name).cancel()
                    self._flipped[name] = role
                case Share(name, spec):
                    await self._runtime.share(Order(name, spec))
                case Pause():
                    await self._pause()
                case Resume():
                    await self._resume()

    def stay_all(self) -> None:
        """Who was to leave may stay."""
        for name in tuple(self._leaving):
            self._stay(self._leaving, name)

    def cancel(self) -> None:
        for task in (*self._leaving.values(), *self._emptying.values(), *self._stopping.values()):
            task.cancel()

    async def _start(self, order: Order) -> None:
        name = order.id
        if name in self._emptying:  # one that drains is taken back
            self._stay(self._emptying, name)
        await self._runtime.start(order)
        if all(one.order.id != name for one in self.instances or ()):
            self._started[name] = Observed(order, Phase.STARTING), time.monotonic()

    def _stay(self, waits: Waits, name: str) -> None:
        waits.pop(name).cancel()
        self._doors.drain(name, False)

    def _empty(self, name: str) -> None:
        """Give it nothing new, and wait until nothing is left on it."""
        if name not in self._emptying:
            self._doors.drain(name)
            self._emptying[name] = self._awaited(self._until_empty(name))

    async def _until_empty(self, name: str) -> None:
        try:
            async with asyncio.timeout(self._deadlines.drain_s):
                await self._doors.until_empty(name)
        except TimeoutError:
            cut = under_way(self._doors.table, name)
            self._say(f"{name} had {self._deadlines.drain_s:g} s to drain (--drain-s): {cut} requests are cut off")
            if self._changes.present is not None:
                self._changes.present.cut += cut

    async def _stop(self, name: str) -> None:
        try:
            async with asyncio.timeout(self._deadlines.stop_s + self._deadlines.call_s):
                await self._runtime.stop(name, self._deadlines.stop_s)
        except Exception as error:  # noqa: BLE001 - asked for again at the next look
            logger.warning("%s could not be stopped: %s", name, error or type(error).__name__)
            await asyncio.sleep(self._deadlines.retry_s)
            self._stopping.pop(name, None)
            self._wake()

    def _awaited(self, what: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(what)
        task.add_done_callback(lambda _: self._wake())
        return task

    async def _pause(self) -> None:
        change = self._changes.present
        assert change is not None, "only a change pauses"
        self._paused_at = time.monotonic()
        self.paused_until = time.time() + change.pause_s
        await self._write()
        self._doors.pause(change.pause_s)

    async def _resume(self) -> None:
        if self.paused:
            if self._changes.present is not None:
                self._changes.present.paused_s += time.monotonic() - self._paused_at
            self.paused_until = 0.0
            await self._write()
            self._doors.pause(0.0)


def _over(waits: Waits) -> frozenset[str]:
    """Whose wait has ended as it should."""
    return frozenset(
        name for name, task in waits.items() if task.done() and (task.cancelled() or task.exception() is None)
    )
