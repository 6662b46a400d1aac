"""A runtime in memory, and as harsh as real ones: starts that fail, hang, come late, come up and die; answers that are
lost after the call has taken effect; a watch that skips states and whose first item is late; room that is enforced.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from deploy.change.types import on_cores
from deploy.runtime.protocol import Node, Observed, Order, Phase
from epd_serve.errors import ConfigError
from epd_serve.instances import Instance
from epd_serve.roles import Role

LOCAL = Node("local", "cpu", tuple(range(8)))
DRAWN_PORT = 30000


class Fate(StrEnum):
    """Of one life."""

    SERVES = "serves"
    LATE = "late"  # ten times as long a start
    FAILS = "fails"  # ends before it answers
    HANGS = "hangs"  # does not answer until the patience with starts is over
    DIES = "dies"  # serves, and ends soon


class AnswerLostError(ConnectionError):
    """The call has taken effect; whoever called does not hear of it."""


@dataclass(frozen=True)
class Harshness:
    """Attributes:
    fates: chances of those other than SERVES, 0 to 1 together.
    lost_answers: chance of each call.
    skips_s: up to how long after a change the watch tells of it.
    first_item_s: how late the first item of a watch is.
    """

    fates: tuple[tuple[Fate, float], ...] = ()
    lost_answers: float = 0.0
    skips_s: float = 0.0
    first_item_s: float = 0.0


HARSH = Harshness(
    fates=((Fate.LATE, 0.1), (Fate.FAILS, 0.1), (Fate.HANGS, 0.05), (Fate.DIES, 0.1)),
    lost_answers=0.2,
    skips_s=0.02,
    first_item_s=0.05,
)


@dataclass
class _Kept:
    seen: Observed
    port: int
    draining: bool = False
    up_at: float = 0.0
    ends: asyncio.Event = field(default_factory=asyncio.Event)
    living: asyncio.Task[None] | None = None
    stopping: asyncio.Task[None] | None = None


class FakeRuntime:
    """A `deploy.runtime.protocol.Runtime`. Use as `async with FakeRuntime(...) as runtime:`.

    Args:
        start_s: how long a start takes. patience_s: until one that hangs is given up.

    Attributes:
        fates: of the next lives, by id; chance decides where none are left.
        overfull: resources of which more was taken than there is. Each time a neighbour dies of it.
        asked: all calls, as words.
    """

    def __init__(
        self,
        *nodes: Node,
        harshness: Harshness | None = None,
        chance: random.Random | None = None,
        start_s: float = 0.01,
        patience_s: float = 0.3,
    ) -> None:
        self.fates: dict[str, deque[Fate]] = {}
        self.overfull: list[str] = []
        self.asked: list[tuple[str, ...]] = []
        self._nodes = nodes or (LOCAL,)
        self._harshness = harshness or Harshness()
        self._chance = chance or random.Random(0)
        self._start_s = start_s
        self._patience_s = patience_s
        self._kept: dict[str, _Kept] = {}
        self.life = self._changes = time.monotonic_ns()
        self._changed = asyncio.Event()

    async def __aenter__(self) -> FakeRuntime:
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [task for kept in self._kept.values() for task in (kept.living, kept.stopping) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def kill(self, id: str) -> None:
        """It dies now."""
        self._kept[id].ends.set()

    @property
    def number(self) -> int:
        """Of what there is now."""
        return self._changes

    # --- Runtime --------------------------------------------------------------------------------------------------

    async def nodes(self) -> tuple[Node, ...]:
        return self._nodes

    async def start(self, order: Order) -> None:
        await self._called("start", order.id)
        if order.spec.node not in [node.id for node in self._nodes]:
            raise ConfigError(f"{order.id}: no node {order.spec.node}")
        kept = self._kept.get(order.id)
        if kept is not None and (kept.stopping is not None or not kept.seen.order.spec.stands_for(order.spec)):
            raise ConfigError(f"{order.id} is another's, or being stopped")
        if kept is None or (kept.seen.over and kept.seen.ever_up):
            port = kept.port if kept is not None else DRAWN_PORT + len(self.asked)
            kept = self._kept[order.id] = _Kept(Observed(order, Phase.STARTING), port)
            kept.living = asyncio.create_task(self._live(kept))
        elif kept.draining and not kept.seen.over:
            kept.draining = False
        self._note()
        self._lose_answer()

    async def flip(self, id: str, role: Role) -> None:
        await self._called("flip", id, role)
        if (kept := self._kept.get(id)) is not None and kept.seen.order.spec.role is not role:
            if not kept.seen.order.spec.both:
                raise ConfigError(f"{id} has one half of the connector")
            order, instance = kept.seen.order, kept.seen.instance
            self._set(
                kept,
                order=replace(order, spec=replace(order.spec, role=role)),
                instance=instance and replace(instance, role=role),
            )
        self._lose_answer()

    async def share(self, order: Order) -> None:
        await self._called("share", order.id)
        if (kept := self._kept.get(order.id)) is not None:
            if not kept.seen.order.spec.stands_for(order.spec):
                raise ConfigError(f"{order.id} is another's")
            self._set(kept, order=on_cores(kept.seen, order.spec).order)
        self._lose_answer()

    async def drain(self, id: str) -> None:
        await self._called("drain", id)
        if (kept := self._kept.get(id)) is not None and not kept.seen.over:
            kept.draining = True
            self._note()
        self._lose_answer()

    async def stop(self, id: str, grace_s: float) -> None:
        await self._called("stop", id)
        if (kept := self._kept.get(id)) is not None:
            if kept.stopping is None:
                kept.stopping = asyncio.create_task(self._stop(kept))
                self._note()
            await asyncio.shield(kept.stopping)
        self._lose_answer()

    async def watch(self) -> AsyncIterator[tuple[Observed, ...]]:
        await asyncio.sleep(self._harshness.first_item_s)
        while True:
            told = self._changes
            yield tuple(self._observed(kept) for kept in self._kept.values())
            while self._changes == told:
                await self._changed.wait()
            await asyncio.sleep(self._chance.uniform(0.0, self._harshness.skips_s))

    # --- what happens ---------------------------------------------------------------------------------------------

    async def _called(self, *words: str) -> None:
        self.asked.append(words)
        await asyncio.sleep(0)

    def _lose_answer(self) -> None:
        if self._chance.random() < self._harshness.lost_answers:
            raise AnswerLostError("the answer was lost")

    async def _live(self, kept: _Kept) -> None:
        name = kept.seen.order.id
        for life in range(1000):
            kept.ends.clear()
            role, incarnation = kept.seen.order.spec.role, uuid.uuid4().hex[:12]
            instance = Instance(name, role, f"http://127.0.0.1:{kept.port}", incarnation)
            self._set(kept, phase=Phase.STARTING, instance=instance, restarts=life, retry_in_s=None, pid=kept.port)
            self._take_room(kept)
            reason = await self._serve(kept, self._fate(name))
            kept.up_at = 0.0
            over = kept.draining or not kept.seen.ever_up
            retry_in_s = None if over else self._start_s
            self._set(kept, phase=Phase.DOWN, reason=reason, over=over, start_s=0.0, retry_in_s=retry_in_s, pid=None)
            if over:
                return
            await asyncio.sleep(self._start_s)
            if kept.draining:
                self._set(kept, over=True, retry_in_s=None)
                return

    async def _serve(self, kept: _Kept, fate: Fate) -> str:
        """Until this life ends. Why it did."""
        start_s = self._start_s * (10 if fate is Fate.LATE else 1)
        if await _within(kept.ends, self._patience_s if fate is Fate.HANGS else start_s):
            return "killed"
        if fate in (Fate.FAILS, Fate.HANGS):
            return f"it {fate}"
        kept.up_at = time.monotonic()
        self._set(kept, phase=Phase.UP, ever_up=True, start_s=start_s, reason="")
        await _within(kept.ends, self._start_s if fate is Fate.DIES else None)
        return "killed"

    async def _stop(self, kept: _Kept) -> None:
        assert kept.living is not None
        await asyncio.sleep(10 * self._start_s)
        kept.living.cancel()
        await asyncio.wait([kept.living])
        del self._kept[kept.seen.order.id]
        self._note()

    def _fate(self, id: str) -> Fate:
        if self.fates.get(id):
            return self.fates[id].popleft()
        at = self._chance.random()
        for fate, chance in self._harshness.fates:
            if at < chance:
                return fate
            at -= chance
        return Fate.SERVES

    def _take_room(self, kept: _Kept) -> None:
        """Somebody who has more than there is room for dies: rather another one than who came last."""
        needs, node_id = kept.seen.order.spec.needs, kept.seen.order.spec.node
        (node,) = (one for one in self._nodes if one.id == node_id)
        there = [one for one in self._kept.values() if one.seen.order.spec.node == node_id and not one.seen.over]
        for what in needs:
            if sum(one.seen.order.spec.needs.get(what, 0) for one in there) > node.room.get(what, float("inf")):
                self.overfull.append(what)
                others: Sequence[_Kept] = [
                    one for one in there if one is not kept and one.seen.order.spec.needs.get(what)
                ]
                (self._chance.choice(others) if others else kept).ends.set()

    def _observed(self, kept: _Kept) -> Observed:
        phase = kept.seen.phase
        if kept.stopping is not None:
            phase = Phase.STOPPING
        elif kept.draining and phase is not Phase.DOWN:
            phase = Phase.DRAINING
        return replace(kept.seen, phase=phase, up_s=time.monotonic() - kept.up_at if kept.up_at else 0.0)

    def _set(self, kept: _Kept, **fields: Any) -> None:
        kept.seen = replace(kept.seen, **fields)
        self._note()

    def _note(self) -> None:
        self._changes += 1
        self._changed.set()
        self._changed = asyncio.Event()


async def _within(event: asyncio.Event, seconds: float | None) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            return await event.wait()
    return False
