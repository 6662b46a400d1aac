"""Devices of the node pods, lent to one deployment: whoever has scheduled a pod has reserved its devices for it.

So nobody else takes them, and what is lent is a note. What is on a pod that ends soon moves to another one that has
room, before it has gone; where none has, it stays as long as it can.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import msgspec

from deploy.cluster.hosts import Host
from deploy.host.state import State
from deploy.runtime.leases import LeaseError, Place

NOTE = "leases.json"
"""The note of what is leased."""

ACQUIRE_S = 10.0
"""For pods to come that have room."""

LOOK_S = 0.5
Ids = Mapping[str, Sequence[int]]
"""The devices of each node that is a part of the deployment, under the numbers that they have there."""


class PodLeases:
    """`Leases` of one deployment.

    Args:
        kind: of its devices. placement: `pack`, `spread` or `strict_spread`, over pods.
        notes: of the deployment.
        hosts: tells the pods. joined: tells which of them can be used.
        acquire_s: how long whoever asks waits for pods to come.

    Attributes:
        wanted: widths of what would be leased if it were there, and of what is being waited for.
    """

    def __init__(
        self,
        kind: str,
        placement: str,
        notes: State,
        hosts: Callable[[], Sequence[Host]],
        joined: Callable[[], Ids],
        acquire_s: float = ACQUIRE_S,
    ) -> None:
        self._kind = kind
        self._placement = placement
        self._notes = notes
        self._hosts = hosts
        self._joined = joined
        self._acquire_s = acquire_s
        noted = msgspec.json.decode(notes.read(NOTE) or b"[]", type=list[Place])
        self._places = {place.lease: place for place in noted}
        self._one_at_a_time = asyncio.Lock()
        self._would: tuple[int, ...] = ()
        self._asked: tuple[int, ...] = ()
        self._changed = asyncio.Event()

    @property
    def wanted(self) -> tuple[int, ...]:
        return (*self._would, *self._asked)

    async def acquire(self, widths: Sequence[int]) -> tuple[Place, ...]:
        async with self._one_at_a_time:
            self._would, self._asked = (), tuple(widths)
            made = self._fresh(widths)
            try:
                async with asyncio.timeout(self._acquire_s):
                    while not all(place.node for place in made):
                        await self._look()
                        made = self._fresh(widths)
            except TimeoutError:
                missing = [place.width for place in made if not place.node]
                raise LeaseError(self._kind, missing, await self.free()) from None
            finally:
                self._asked = ()
            self._note({**self._places, **{place.lease: place for place in made}})
            return tuple(made)

    async def places(self) -> tuple[Place, ...]:
        self._settle()
        return tuple(self._places.values())

    async def free(self) -> Mapping[str, int]:
        return {node: len(ids) for node, ids in self._free(self._places.values()).items()}

    async def release(self, leases: Iterable[str]) -> None:
        gone = set(leases) & self._places.keys()
        if gone:
            self._note({lease: place for lease, place in self._places.items() if lease not in gone})

    def want(self, widths: Sequence[int]) -> None:
        self._would = tuple(widths)
        self._tell()

    async def watch(self) -> AsyncIterator[tuple[Place, ...]]:
        told: tuple[Place, ...] | None = None
        while True:
            if (now := await self.places()) != told:
                told = now
                yield now
            await self._look()

    async def _look(self) -> None:
        """Wait until something may be otherwise."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await self._changed.wait()

    def _fresh(self, widths: Sequence[int]) -> list[Place]:
        """A place for each, with no node where there is no room."""
        first = max((int(lease) for lease in self._places), default=-1) + 1
        made = [Place(str(number), width, "", ()) for number, width in enumerate(widths, first)]
        for at in sorted(range(len(made)), key=lambda at: -made[at].width):  # the widest have the fewest to choose from
            made[at] = self._placed(made[at], [*self._places.values(), *made[:at], *made[at + 1 :]])
        return made

    def _settle(self) -> None:
        """What is on a pod that has gone, or goes, moves; what is nowhere gets room where there is some."""
        hosts = {one.id: one for one in self._hosts()}
        now = dict(self._places)
        for lease, place in self._places.items():
            if place.node in hosts and not hosts[place.node].leaving:
                continue
            others = [one for one in now.values() if one.lease != lease]
            moved = self._placed(place, others)
            if moved.node or place.node not in hosts:
                now[lease] = moved
        if now != self._places:
            self._note(now)

    def _placed(self, place: Place, others: Sequence[Place]) -> Place:
        """It beside these, on the pod that suits best."""
        used = Counter(one.node for one in others if one.node)
        free = {node: ids for node, ids in self._free(others).items() if len(ids) >= place.width}
        if self._placement == "strict_spread":
            free = {node: ids for node, ids in free.items() if node not in used}
        if not free:
            waits = f"{place.width} free {self._kind} on one pod"
            return replace(place, node="", devices=(), waits=waits)
        if self._placement == "pack":
            node = max(free, key=lambda node: (node in used, len(free[node])))
        else:
            node = max(free, key=lambda node: (-used[node], len(free[node])))
        return replace(place, node=node, devices=tuple(free[node][: place.width]), waits="")

    def _free(self, places: Iterable[Place]) -> dict[str, list[int]]:
        """Devices that nobody of these has, by pod, of those that stay."""
        taken = {(one.node, device) for one in places for device in one.devices}
        joined = self._joined()
        return {
            host.id: [id for id in joined[host.id] if (host.id, id) not in taken]
            for host in self._hosts()
            if host.id in joined and not host.leaving
        }

    def _note(self, places: dict[str, Place]) -> None:
        self._places = places
        self._notes.write(NOTE, msgspec.json.encode(list(places.values())))
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
