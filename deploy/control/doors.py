"""What the controller asks of the front doors (`deploy/front/doors.py` is the real thing)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from deploy.front.occupancy import Views
from deploy.runtime.protocol import Observed
from epd_serve.roles import Role


class Doors(Protocol):
    """All of a deployment's front doors as one."""

    @property
    def table(self) -> Views:
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
