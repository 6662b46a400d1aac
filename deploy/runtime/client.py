"""The runtime of one machine as others see it: its agent, another process, which may be killed and started again."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable

from deploy.runtime.asking import Asking
from deploy.runtime.messages import (
    Answer,
    Call,
    Close,
    Done,
    Drain,
    Flip,
    Groups,
    Know,
    Nodes,
    Seen,
    Start,
    Stop,
    Watch,
    from_agent,
)
from deploy.runtime.protocol import Node, Observed, Order
from deploy.runtime.stream import Open
from epd_serve.errors import EpdError
from epd_serve.peers import Peer
from epd_serve.roles import Role


class AgentError(EpdError):
    """The agent has failed at a call. It may be repeated."""

    retryable = True


class AgentClient:
    """A `Runtime`. Connects when it is first asked something, and again when the agent has gone. Each call may be told
    to several agents, one after the other, and raises ConfigError or AgentError, as the one says that answers.

    Args:
        open: opens a stream to the agent's socket.
        say: takes a line for the operator; told as long as somebody watches.
        epoch: as of `Asking`.
    """

    def __init__(self, open: Open, say: Callable[[str], None], epoch: int = 0) -> None:
        self._agent: Asking[Answer] = Asking(open, from_agent, AgentError, say, epoch)

    async def nodes(self) -> tuple[Node, ...]:
        return (await self._ask(Nodes())).nodes

    async def start(self, order: Order) -> None:
        await self._ask(Start(order))

    async def flip(self, id: str, role: Role) -> None:
        await self._ask(Flip(id, role))

    async def drain(self, id: str) -> None:
        await self._ask(Drain(id))

    async def stop(self, id: str, grace_s: float) -> None:
        await self._ask(Stop(id, grace_s))

    async def watch(self) -> AsyncIterator[tuple[Observed, ...]]:
        async with contextlib.aclosing(self._agent.follow(Watch())) as answers:
            async for answer in answers:
                assert isinstance(answer, Seen), "a watch's answer"
                yield answer.instances

    async def know(self, peers: tuple[Peer, ...]) -> None:
        """These are there on other nodes, and no others. Each agent that comes later is told it first."""
        call = Know(peers)
        self._agent.standing = lambda: call
        await self._ask(call)

    async def groups(self) -> dict[str, int]:
        """Process groups that run now: of the instances, of the template, of Mooncake's master, by name."""
        return (await self._ask(Groups())).groups

    async def close(self) -> None:
        """End all instances and what they share; returns when nothing of it is left."""
        await self._ask(Close())

    async def disconnect(self) -> None:
        """Nothing more is asked."""
        await self._agent.disconnect()

    async def _ask(self, call: Call) -> Done:
        answer = await self._agent.ask(call)
        assert isinstance(answer, Done), "a call's answer"
        return answer
