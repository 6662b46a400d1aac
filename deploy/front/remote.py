"""The front doors of one node as its controller sees them, by the node's HTTP API (`deploy/runtime/node_api.py`)."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Callable, Sequence
from types import NoneType
from typing import TYPE_CHECKING

import httpx

from deploy.front.traced import NodeTrace, offset_s
from deploy.runtime.node_api import FrontState, FrontStatus
from deploy.runtime.node_client import NodeHttp
from epd_serve.errors import EpdError
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
        stale: it may know something older than what is so. lost: set when its node has gone.
        state: says what its front doors are to know now; None as long as nobody knows. Each life of it is told.
    """

    def __init__(self, transport: httpx.AsyncBaseTransport, epoch: int = 0) -> None:
        self.status = FrontStatus()
        self.counts: list[Family] = []
        self.node = ""
        self.stale, self.lost = asyncio.Event(), asyncio.Event()
        self.state: Callable[[], FrontState | None] = lambda: None
        self._http = NodeHttp("/front", transport, epoch)

    async def follow(self) -> None:
        """Keep `status` up to date, until cancelled."""
        number = life = 0
        while True:
            seen = await self._http.newer(FrontStatus, number)
            if seen is None:
                continue
            number, self.status = seen.number, seen.value
            if seen.life != life:
                await self.tell()
                life = seen.life

    async def tell_news(self) -> None:
        """As soon as there is some."""
        await self.stale.wait()
        self.stale.clear()
        try:
            await self.tell()
        except EpdError:
            self.stale.set()
            raise

    async def tell(self) -> None:
        """Have it know what is so now. Before anybody has said what is, nothing is told."""
        if (state := self.state()) is not None:
            await self._http.call("take_in", NoneType, state)

    async def told(self, wait: str, *arguments: str) -> None:
        """Wait there for something (`ready`, `seen`, `until_empty`, `until_quiet`, `idle`) that is about all that has
        been said until now."""
        await self.tell()
        await self._http.call(wait, NoneType, *arguments)

    async def pausable_s(self) -> float:
        seconds = await self._http.call("pausable_s", float | None)  # type: ignore[arg-type]
        return math.inf if seconds is None else seconds

    async def counted(self) -> list[Family]:
        self.counts = await self._http.call("counted", list[Family])
        return self.counts

    async def look(self, question: Question) -> RecordsAnswer:
        return await self._http.call("look", RecordsAnswer, question)

    async def traced(self, subjects: Sequence[str]) -> NodeTrace:
        """What is stamped there about these, with how far its clock is from ours."""

        async def time_s() -> float:
            return await self._http.call("time_s", float)

        apart_s, uncertainty_s = await offset_s(time_s)
        stamps = await self._http.call("stamps", list[Stamp], subjects) if subjects else ()
        return NodeTrace(self.node, apart_s, uncertainty_s, stamps)

    async def restart(self) -> None:
        await self._http.call("restart", NoneType, secrets.token_hex(4))

    async def end(self) -> None:
        await self._http.call("end", NoneType)

    async def disconnect(self) -> None:
        """Nothing more is asked."""
        await self._http.close()
