"""The front doors of one node as its controller sees them, by the node's HTTP API (`deploy/runtime/node_api.py`)."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from types import NoneType
from typing import TYPE_CHECKING

import httpx

from deploy.front.traced import NodeTrace, offset_s
from deploy.runtime.node_api import FrontState, FrontStatus
from deploy.runtime.node_client import NodeHttp
from epd_serve.phases.stamps import Stamp
from proxy.records.records import RecordsAnswer
from proxy.workers.wire import Family

if TYPE_CHECKING:
    from proxy.records.records import Question


class RemoteDoors:
    """Calls raise what those of `NodeHttp` do.

    Attributes:
        status: as it was last heard.
        counts: what its front doors had counted when they were asked last. node: that they are of.
        state: says what its front doors are to know now; None as long as nobody knows. Each life of it is told.
    """

    def __init__(self, transport: httpx.AsyncBaseTransport, epoch: int = 0) -> None:
        self.status = FrontStatus()
        self.counts: list[Family] = []
        self.node = ""
        self.state: Callable[[], FrontState | None] = lambda: None
        self._http = NodeHttp(transport, epoch)

    async def follow(self) -> None:
        """Keep `status` up to date, until cancelled."""
        number = life = 0
        while True:
            seen = await self._http.newer("/front", FrontStatus, number)
            if seen is None:
                continue
            number, self.status = seen.number, seen.value
            if seen.life != life:
                await self.tell()
                life = seen.life

    async def tell(self) -> None:
        """Have it know what is so now. Before anybody has said what is, nothing is told."""
        if (state := self.state()) is not None:
            await self._http.call("PUT", "/front", NoneType, state)

    async def ready(self) -> None:
        """Wait until all of its front doors serve, and know what has been said."""
        await self._told("/front/ready")

    async def seen(self) -> None:
        await self._told("/front/seen")

    async def until_empty(self, id: str) -> None:
        await self._told(f"/front/empty/{id}")

    async def until_quiet(self, id: str) -> None:
        await self._told(f"/front/quiet/{id}")

    async def idle(self) -> None:
        await self._told("/front/idle")

    async def pausable_s(self) -> float:
        (seconds,) = await self._http.call("GET", "/front/pausable", tuple[float | None])
        return math.inf if seconds is None else seconds

    async def counted(self) -> list[Family]:
        self.counts = await self._http.call("GET", "/front/counts", list[Family])
        return self.counts

    async def look(self, question: Question) -> RecordsAnswer:
        return await self._http.call("POST", "/front/records", RecordsAnswer, question)

    async def traced(self, subjects: Sequence[str]) -> NodeTrace:
        """What is stamped there about these, with how far its clock is from ours."""

        async def time_s() -> float:
            return await self._http.call("GET", "/front/time", float)

        apart_s, uncertainty_s = await offset_s(time_s)
        stamps = await self._http.call("POST", "/front/stamps", list[Stamp], subjects) if subjects else ()
        return NodeTrace(self.node, apart_s, uncertainty_s, stamps)

    async def restart(self) -> None:
        await self._http.call("PUT", f"/front/restarts/{secrets.token_hex(4)}", NoneType)

    async def end(self) -> None:
        await self._http.call("DELETE", "/front", NoneType)

    async def disconnect(self) -> None:
        """Nothing more is asked."""
        await self._http.close()

    async def _told(self, path: str) -> None:
        """Wait for something there that is about all that has been said until now."""
        await self.tell()
        await self._http.call("GET", path, NoneType)
