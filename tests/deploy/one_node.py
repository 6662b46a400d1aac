"""One node over its HTTP API as a `deploy.runtime.protocol.Runtime`, with no other nodes beside it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from deploy.runtime.node_client import NodeClient
from deploy.runtime.protocol import Node, Observed
from tests.deploy.node_socket import NODE_SOCKET, unix_transport


class OneNode(NodeClient):
    """Args:
    run: its run directory. say: takes its lines for the operator, as long as somebody watches.
    """

    def __init__(self, run: Path, say: Callable[[str], object]) -> None:
        super().__init__(unix_transport(run / NODE_SOCKET))
        self._run = run
        self._say = say

    def another(self) -> OneNode:
        """For somebody who disconnects it when he is done: this one goes on."""
        return OneNode(self._run, self._say)

    async def nodes(self) -> tuple[Node, ...]:
        while (seen := await self.status()) is None:
            pass
        return seen.value.nodes

    async def watch(self) -> AsyncGenerator[tuple[Observed, ...]]:
        number = 0
        while True:
            seen = await self.status(number)
            if seen is not None:
                number = seen.number
                for line in seen.value.lines:
                    self._say(line)
                yield seen.value.instances
