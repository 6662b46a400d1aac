"""What whoever places node processes says of hosts, and keeps for us: Ray, or Kubernetes. Else nodes are asked."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from deploy.runtime.leases import Place


@dataclass(frozen=True)
class Host:
    """A machine, or a part of one, that can have a node process.

    Attributes:
        id: as long as its devices are the same. name: for people. about: what it has, for people.
        address: at which its stages are reached by others; "": as its node process says.
        devices: how many of the deployment's kind it lends; with none it is no node.
        leaving: it ends soon: it gets nothing new, and what is there moves.
    """

    id: str
    name: str
    devices: int
    address: str = ""
    about: str = ""
    leaving: bool = False


class Hosts(Protocol):
    """Of one deployment. Every call has a deadline of its own, raises EpdError, and blocks no event loop."""

    def watch(self) -> AsyncIterator[tuple[Host, ...]]:
        """All that live, at once and after each change."""
        ...

    async def find(self, id: str) -> str:
        """`HOST:PORT` of the node process that runs there, "" where none does."""

    async def reach(self, id: str, clients: str = "") -> str:
        """The same, of one that is started where there is none.

        Args:
            clients: `HOST:PORT` of its front doors, for who holds that between two lives of it.
        """

    async def leave(self, id: str) -> None:
        """No node process has to run there any more: it is ended where that gives the host back."""

    async def parts(self) -> dict[str, int]:
        """Pids of what keeps node processes alive, as `HOST/NAME`."""


class Reserver:
    """Keeps others from what is leased. As it is here nobody has to."""

    async def look(self, places: Mapping[str, Place]) -> tuple[Collection[str], Mapping[str, int]]:
        """The leases among these whose devices are kept; and how many devices of each node others have."""
        return places.keys(), {}

    async def reserve(
        self, lease: str, width: int, able: Sequence[str], within_s: float
    ) -> tuple[str, tuple[int, ...]]:
        """Devices of the first of these nodes or, where that has no room after all, of another one.

        Returns:
            The node, "" where there was none in time, and its devices; none where any that are free will do.
        """
        return able[0], ()

    async def keep(self, places: Mapping[str, Place]) -> None:
        """Everything else is given back."""

    async def want(self, widths: Sequence[int], not_on: Collection[str]) -> None:
        """There are to be nodes with so many devices each, other than these: in place of what was wanted before."""
