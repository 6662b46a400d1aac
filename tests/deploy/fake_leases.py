"""Whoever lends devices, in memory, and as harsh as a cluster's scheduler: all that is asked for or nothing, within a
deadline; what was on a node that has died moves where there is room, or waits, and takes the first that comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from deploy.runtime.leases import LeaseError, Place


class FakeLeases:
    """A `deploy.runtime.leases.Leases`.

    Args:
        nodes: devices by node. kind: of them.

    Attributes:
        calls: what was asked for, in order. after_call: called when one has taken effect, before it is answered.
        gives_back: called with each place that is released.
        others: devices that somebody else has taken, by node.
        wanted: widths of what would be leased if it were there.
    """

    def __init__(self, nodes: Mapping[str, int], kind: str = "cpu", acquire_s: float = 0.05) -> None:
        self.nodes = dict(nodes)
        self.others: dict[str, int] = {}
        self.wanted: tuple[int, ...] = ()
        self.calls: list[str] = []
        self.after_call: Callable[[], None] = lambda: None
        self.gives_back: Callable[[Place], None] = lambda place: None
        self._kind = kind
        self._acquire_s = acquire_s
        self._numbers = itertools.count()
        self._places: dict[str, Place] = {}
        self._changed = asyncio.Event()

    async def acquire(self, widths: Sequence[int]) -> tuple[Place, ...]:
        self.calls.append(f"acquire {[*widths]}")
        self.wanted = ()
        made = [Place(f"lease{next(self._numbers)}", width, "", (), "room") for width in widths]
        self._places |= {one.lease: one for one in made}  # in the queue, as a placement group that is pending
        try:
            self._settle()
            async with asyncio.timeout(self._acquire_s):
                while not all(self._places[one.lease].node for one in made):
                    self._changed.clear()
                    await self._changed.wait()
        except BaseException as error:
            missing = [one.width for one in made if not self._places[one.lease].node]
            await self.release([one.lease for one in made])
            if isinstance(error, TimeoutError):
                raise LeaseError(self._kind, missing, await self.free()) from None
            raise
        self.after_call()
        return tuple(self._places[one.lease] for one in made)

    async def places(self) -> tuple[Place, ...]:
        return tuple(self._places.values())

    async def free(self) -> Mapping[str, int]:
        return {node: len(self._free(node)) for node in self.nodes}

    async def release(self, leases: Iterable[str]) -> None:
        leases = list(leases)
        self.calls.append(f"release {len(leases)}")
        for lease in leases:
            if (place := self._places.pop(lease, None)) is not None:
                self.gives_back(place)
        self._settle()
        self.after_call()

    def want(self, widths: Sequence[int]) -> None:
        self.wanted = tuple(widths)

    async def watch(self) -> AsyncIterator[tuple[Place, ...]]:
        told: tuple[Place, ...] | None = None
        while True:
            now = tuple(self._places.values())
            if now != told:
                told = now
                yield now
            self._changed.clear()
            with contextlib.suppress(TimeoutError):  # there may be other watchers
                async with asyncio.timeout(0.01):
                    await self._changed.wait()

    # What happens to nodes.

    def dies(self, node: str) -> None:
        """What was leased there moves if there is room."""
        del self.nodes[node]
        for lease, one in self._places.items():
            if one.node == node:
                self._places[lease] = replace(one, node="", devices=(), waits="a node with room")
        self._settle()

    def comes(self, node: str, devices: int) -> None:
        self.nodes[node] = devices
        self._settle()

    def holds(self, node: str, devices: Iterable[int]) -> bool:
        """These are leased now."""
        ours = {device for one in self._places.values() if one.node == node for device in one.devices}
        return ours.issuperset(devices)

    def check(self) -> None:
        """No device is given twice, and none of a node that there is not."""
        given = [(one.node, device) for one in self._places.values() for device in one.devices]
        assert len(given) == len(set(given)), given
        for node, device in given:
            assert node in self.nodes and device < self.nodes[node], (node, device)

    def _free(self, node: str) -> list[int]:
        ours = {device for one in self._places.values() if one.node == node for device in one.devices}
        free = [device for device in range(self.nodes[node]) if device not in ours]
        return free[: max(0, len(free) - self.others.get(node, 0))]

    def _settle(self) -> None:
        """Whoever has waited longest comes first."""
        for lease, one in self._places.items():
            if not one.node:
                count = one.width
                fitting = [node for node in self.nodes if len(self._free(node)) >= count]
                if not fitting:
                    continue
                node = fitting[0]
                self._places[lease] = replace(one, node=node, devices=tuple(self._free(node)[:count]), waits="")
        self.check()
        self._changed.set()
