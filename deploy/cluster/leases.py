"""The devices that a deployment has leased of the nodes it is on: chosen here, noted, and moved when a node goes.

What keeps others from a node's devices meanwhile is whoever places nodes, by a `Reserver`: Ray has placement groups;
who has scheduled a pod has reserved its devices already. What is on a node that ends soon moves to another one that
has room, before it has gone; where none has, it stays as long as it can.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import msgspec

from deploy.cluster.hosts import Reserver
from deploy.cluster.nodes import WANTED, Nodes
from deploy.host.state import State
from deploy.runtime.leases import LeaseError, Place

NOTE = "leases.json"
"""The note of what is leased."""

ACQUIRE_S, MOVE_S = 10.0, 2.0
"""For devices to come that are asked for, and to be had on a node that seems to have room for what moves."""

LOOK_S = 0.5


class ClusterLeases:
    """`Leases` of one deployment.

    Args:
        kind: of its devices. placement: `pack`, `spread` or `strict_spread`, over nodes.
        notes: of the deployment.
        acquire_s: how long whoever asks waits for devices to come.
    """

    def __init__(
        self,
        kind: str,
        placement: str,
        notes: State,
        nodes: Nodes,
        reserver: Reserver,
        acquire_s: float = ACQUIRE_S,
    ) -> None:
        self._kind = kind
        self._placement = placement
        self._notes = notes
        self._nodes = nodes
        self._reserver = reserver
        self._acquire_s = acquire_s
        noted = msgspec.json.decode(notes.read(NOTE) or b"[]", type=list[Place])
        self._places = {place.lease: place for place in noted}
        self._one_at_a_time = asyncio.Lock()
        self._would: tuple[int, ...] = ()
        self._asked: tuple[int, ...] = ()
        self._tidy = False  # a controller before this one may not have got to note something, or to give it back
        self._changed = asyncio.Event()

    @property
    def wanted(self) -> tuple[int, ...]:
        """Widths of what would be leased if it were there, and of what is being waited for."""
        return (*self._would, *self._asked)

    async def acquire(self, widths: Sequence[int]) -> tuple[Place, ...]:
        self._would, self._asked = (), tuple(widths)
        until = time.monotonic() + self._acquire_s
        try:
            while True:
                made = await self._acquire(widths, until)
                missing = [place.width for place in made if not place.node]
                if not missing:
                    return tuple(made)
                if time.monotonic() > until:
                    raise LeaseError(self._kind, missing, await self.free())
                await self._wait()
        finally:
            self._asked = ()

    async def places(self) -> tuple[Place, ...]:
        async with self._one_at_a_time:
            await self._settle()
            return tuple(self._places.values())

    async def free(self) -> Mapping[str, int]:
        _, taken = await self._reserver.look(self._places)
        return {node: len(ids) for node, ids in self._free(self._places.values(), taken).items()}

    async def release(self, leases: Iterable[str]) -> None:
        async with self._one_at_a_time:
            gone = set(leases) & self._places.keys()
            if gone:
                self._note({lease: place for lease, place in self._places.items() if lease not in gone})
                await self._reserver.keep(self._places)

    def want(self, widths: Sequence[int]) -> None:
        self._would = tuple(widths)
        if widths and self._notes.read(WANTED) is None:
            self._notes.write(WANTED, b"")
        self._tell()

    async def watch(self) -> AsyncIterator[tuple[Place, ...]]:
        told: tuple[Place, ...] | None = None
        while True:
            if (now := await self.places()) != told:
                told = now
                yield now
            await self._wait()

    async def _wait(self) -> None:
        """Until something may be otherwise."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await self._changed.wait()

    async def _acquire(self, widths: Sequence[int], until: float) -> list[Place]:
        """All of them are leased, or none: then those have no node for which there is no room."""
        async with self._one_at_a_time:
            made = await self._made(widths, Reserver(), until)
            if all(place.node for place in made):
                try:
                    made = await self._made(widths, self._reserver, until)
                    if all(place.node for place in made):
                        every = {**self._places, **{place.lease: place for place in made}}
                        await self._nodes.run_on(_on(every.values()))
                        self._note(every)
                finally:
                    await asyncio.shield(self._reserver.keep(self._places))
            return made

    async def _made(self, widths: Sequence[int], reserver: Reserver, until: float) -> list[Place]:
        """A place for each, with no node where there is no room."""
        _, taken = await self._reserver.look(self._places)
        first = max((int(lease) for lease in self._places), default=-1) + 1
        made = [Place(str(number), width, "", ()) for number, width in enumerate(widths, first)]
        for at in sorted(range(len(made)), key=lambda at: -made[at].width):  # the widest have the fewest to choose from
            others = [*self._places.values(), *made[:at], *made[at + 1 :]]
            made[at] = await self._placed(made[at], others, taken, reserver, until - time.monotonic())
        return made

    async def _settle(self) -> None:
        """What is on a node that has gone, or goes, moves; what is nowhere gets room where there is some."""
        kept, taken = await self._reserver.look(self._places)
        now = dict(self._places)
        for lease, place in self._places.items():
            there = lease in kept and place.node in self._nodes.devices
            if there and place.node not in self._nodes.leaving:
                continue
            others = [one for one in now.values() if one.lease != lease]
            moved = await self._placed(place, others, taken, self._reserver, MOVE_S)
            if moved.node or not there:
                now[lease] = moved
        await self._nodes.run_on(_on(now.values()))
        if now != self._places or not self._tidy:
            self._note(now)
            self._tidy = True
            await self._reserver.keep(now)
        used = _on(now.values()) if self._placement == "strict_spread" else set()
        waiting = [place.width for place in now.values() if not place.node]
        await self._reserver.want([*self.wanted, *waiting], {*self._nodes.left_out, *used})

    async def _placed(
        self, place: Place, others: Sequence[Place], taken: Mapping[str, int], reserver: Reserver, within_s: float
    ) -> Place:
        """It beside these, on the node that suits best."""
        used = Counter(one.node for one in others if one.node)
        free = {node: ids for node, ids in self._free(others, taken).items() if len(ids) >= place.width}
        if self._placement == "strict_spread":
            free = {node: ids for node, ids in free.items() if node not in used}
        packs = self._placement == "pack"
        able = sorted(free, key=lambda at: (at in used if packs else -used[at], len(free[at])), reverse=True)
        node, devices = await reserver.reserve(place.lease, place.width, able, within_s) if able else ("", ())
        if not node:
            return replace(place, node="", devices=(), waits=f"{place.width} free {self._kind} on one node")
        return replace(place, node=node, devices=devices or tuple(free[node][: place.width]), waits="")

    def _free(self, places: Collection[Place], taken: Mapping[str, int]) -> dict[str, list[int]]:
        """Devices that nobody of these has, nor others, by node, of those that stay."""
        ours = {(one.node, device) for one in places for device in one.devices}
        free = {}
        for node, ids in self._nodes.devices.items():
            if node not in self._nodes.leaving:
                room = len(ids) - sum(one.width for one in places if one.node == node) - taken.get(node, 0)
                free[node] = [id for id in ids if (node, id) not in ours][: max(0, room)]
        return free

    def _note(self, places: dict[str, Place]) -> None:
        self._places = places
        self._notes.write(NOTE, msgspec.json.encode(list(places.values())))
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _on(places: Iterable[Place]) -> set[str]:
    """The nodes that any of them is on."""
    return {place.node for place in places if place.node}
