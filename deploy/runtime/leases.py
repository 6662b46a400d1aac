"""What a deployment asks of whoever lends it devices of a cluster that others use, too.

A place is so many whole devices of one node, for the instances of one group. It is leased until it is released, also
while nobody is left who asked for it: whoever comes next finds it in `places`. When its node dies it moves, or waits.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from deploy.memory.placement_table import short_node
from epd_serve.errors import EpdError


@dataclass(frozen=True)
class Place:
    """So many whole devices that were leased together.

    Attributes:
        lease: its id, also when it has moved. width: how many devices.
        node: that has the devices; "" while none has.
        devices: under the numbers that they have there; empty while it is nowhere.
        waits: what it waits for then, in a few words.
    """

    lease: str
    width: int
    node: str
    devices: tuple[int, ...]
    waits: str = ""


class LeaseError(EpdError):
    """Not all that was asked for is there.

    Attributes:
        lacks: what is not there, in a few words.
        missing: devices of each place that nobody could give. free: devices that could be leased now, by node.
    """

    status = 409
    code = "no_devices"

    def __init__(self, kind: str, missing: Sequence[int], free: Mapping[str, int]) -> None:
        there = (
            ", ".join(f"{short_node(node)} has {count}" for node, count in sorted(free.items())) or "there are no nodes"
        )
        wanted = " and ".join(f"{count} on one node" if count > 1 else "1" for count in missing)
        self.lacks = f"free {kind} devices ({wanted} lacking; {there})"
        self.missing, self.free = tuple(missing), dict(free)
        super().__init__(f"there are not enough {self.lacks}")


class Leases(Protocol):
    """Of one deployment. Every call has a deadline of its own."""

    async def acquire(self, widths: Sequence[int]) -> tuple[Place, ...]:
        """A place with so many devices for each, all on one node, in this order, or none at all; nothing stays leased
        after an error or a cancellation.

        Raises:
            LeaseError: they are not there, or did not come in time.
        """

    async def places(self) -> tuple[Place, ...]:
        """All that is leased, whoever asked for it."""

    async def free(self) -> Mapping[str, int]:
        """Devices that could be leased now, by node; also of nodes that have none left."""

    async def release(self, leases: Iterable[str]) -> None:
        """Others may have them. Those that are not there are nobody's any more already."""

    def want(self, widths: Sequence[int]) -> None:
        """Say, at once, that so many more devices would be leased, each time on one node, if there were such nodes:
        whoever can starts some. `()` takes it back, and so does whatever is leased next."""

    def watch(self) -> AsyncIterator[tuple[Place, ...]]:
        """All places, at once and after each change: of where one is, or of what it waits for."""
        ...
