"""The agent of one node in memory, for `deploy.runtime.many`: it can be cut off, and come again with nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from deploy.runtime.node_api import NodeStatus, Seen
from deploy.runtime.node_client import NodeClient
from deploy.runtime.protocol import Node, Observed, Order
from epd_serve.peers import Peer
from epd_serve.roles import Role
from tests.deploy.fake_runtime import FakeRuntime

WATCH_S = 0.02


class FakeNode(NodeClient):
    """A node without HTTP.

    Attributes:
        runtime: of its present life. known: what it was told of others; None before the first time.
        reachable: cleared while no call and no word comes through.
        parted: nothing more is asked.
    """

    def __init__(self, name: str, *, reachable: bool = True) -> None:
        self.name = name
        self.node = Node(name, "cpu", tuple(range(8)))
        self.runtime = FakeRuntime(self.node)
        self.known: tuple[Peer, ...] | None = None
        self.reachable = asyncio.Event()
        self.parted = False
        if reachable:
            self.reachable.set()

    def begin_again(self) -> None:
        """Another life of it, in which nothing runs."""
        before, self.runtime, self.known = self.runtime, FakeRuntime(self.node), None
        before._note()

    def running(self) -> set[str]:
        return set(self.runtime._kept)

    async def nodes(self) -> tuple[Node, ...]:
        await self.reachable.wait()
        return await self.runtime.nodes()

    async def start(self, order: Order) -> None:
        await self.reachable.wait()
        await self.runtime.start(order)

    async def flip(self, id: str, role: Role) -> None:
        await self.reachable.wait()
        await self.runtime.flip(id, role)

    async def share(self, order: Order) -> None:
        await self.reachable.wait()
        await self.runtime.share(order)

    async def drain(self, id: str) -> None:
        await self.reachable.wait()
        await self.runtime.drain(id)

    async def stop(self, id: str, grace_s: float) -> None:
        await self.reachable.wait()
        await self.runtime.stop(id, grace_s)

    async def status(self, after: int = 0) -> Seen[NodeStatus] | None:
        """The word of a life that has ended meanwhile is lost."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if not after else WATCH_S):
                while True:
                    await self.reachable.wait()
                    seen = await self._newer(self.runtime, after)
                    await self.reachable.wait()
                    if seen.life == self.runtime.life:
                        return seen
        await self.reachable.wait()
        return None

    async def _newer(self, runtime: FakeRuntime, after: int) -> Seen[NodeStatus]:
        async for item in runtime.watch():
            if runtime.number != after or runtime is not self.runtime:
                return Seen(runtime.life, runtime.number, NodeStatus((self.node,), item))
        raise AssertionError("a watch never ends")

    async def watch(self) -> AsyncIterator[tuple[Observed, ...]]:
        while True:
            runtime = self.runtime
            await self.reachable.wait()
            async for item in runtime.watch():
                await self.reachable.wait()
                if runtime is not self.runtime:
                    break
                yield item

    async def know(self, peers: tuple[Peer, ...]) -> None:
        await self.reachable.wait()
        self.known = peers

    async def groups(self) -> dict[str, int]:
        await self.reachable.wait()
        return dict.fromkeys(self.running(), 1)

    async def close(self) -> None:
        await self.reachable.wait()
        await asyncio.gather(*(self.runtime.stop(id, 0.0) for id in self.running()))

    async def disconnect(self) -> None:
        self.parted = True
