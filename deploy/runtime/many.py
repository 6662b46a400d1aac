"""The runtime of a deployment on several machines: their agents as one. Nodes come and go by the word of somebody else.

What runs is what the agents say. Of a node that does not answer, what it said last is shown as down: whether it has
gone is not for here to say. Each agent is told who is there on the other nodes, whenever that changes.

    joined --first word--> there --no answer for `silent_s`--> silent --an answer--> there    any --lose--> gone
    there --rest--> resting --join--> joined
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial

from deploy.runtime.node_api import Following, LostError, NodeStatus, Seen, SilentError, until_lost
from deploy.runtime.node_client import NodeClient
from deploy.runtime.protocol import Node, Observed, Order, Phase
from epd_serve.errors import EpdError
from epd_serve.peers import Peer, peer_of
from epd_serve.roles import Role

SILENT_S = 10.0
"""The way to an agent may be interrupted for a few seconds while its stages serve on."""

FIRST_WORD_S = 10.0
ASK_S = 1.0
"""How long whoever asks all nodes waits for each."""

LEFTOVER_GRACE_S = 8.0


@dataclass(eq=False)
class _Member:
    """A node.

    Attributes:
        agent: None while it is only remembered, or rests.
        instances: its last word, or what is remembered of it.
        heard: the number of that. watched: that of the last word that was waited for. told: who is on other nodes.
        away: set while it does not answer, and when it is lost.
        nodes: what it said of itself.
        leftovers: instances that are being stopped because others have their names.
    """

    id: str
    agent: NodeClient | None = None
    instances: tuple[Observed, ...] = ()
    heard: int = 0
    watched: int = 0
    told: tuple[Peer, ...] | None = None
    nodes: tuple[Node, ...] = ()
    away: asyncio.Event = field(default_factory=asyncio.Event)
    spoken: asyncio.Event = field(default_factory=asyncio.Event)
    lost: bool = False
    leftovers: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    def shown(self) -> tuple[Observed, ...]:
        """Its instances as those who watch are to see them."""
        if self.spoken.is_set() and not self.away.is_set():
            return self.instances
        why = f"node {self.id} is silent"
        return tuple(replace(one, phase=Phase.DOWN, reason=why, retry_in_s=None, up_s=0.0) for one in self.instances)


class ManyNodes(Following):
    """A `Runtime`, in one event loop. Whoever begins to watch it has told of all nodes there are by `join`. Calls about
    a node that is silent, or falls silent meanwhile, raise SilentError; all but `start` do nothing where it is lost.

    Args:
        say: takes a line for the operator.
        remembered: what ran when somebody before us watched last. Its nodes are silent until they join or are lost.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        remembered: Iterable[Observed] = (),
        *,
        silent_s: float = SILENT_S,
        first_word_s: float = FIRST_WORD_S,
    ) -> None:
        super().__init__(say)
        self._silent_s = silent_s
        self._first_word_s = first_word_s
        self._members: dict[str, _Member] = {}
        self._homes: dict[str, str] = {}  # the node of each id
        self._changed = asyncio.Event()
        for one in remembered:
            member = self._members.setdefault(one.order.spec.node, _Member(one.order.spec.node))
            member.instances = (*member.instances, one)
            member.away.set()
            self._homes[one.order.id] = member.id

    def join(self, node: str, agent: NodeClient) -> None:
        """It is a part of the deployment, from its first word on. One that is already has another agent now."""
        member = self._members.setdefault(node, _Member(node))
        self._part_from(member)
        member.agent, member.heard, member.watched, member.told = agent, 0, 0, None
        member.away.clear()
        self.keep(
            node,
            agent.disconnect,
            self.repeat(partial(self._follow, member, agent), f"node {node} cannot be watched"),
            self._keep_informed(member, agent),
        )
        self._tell()

    def rest(self, node: str) -> None:
        """It is asked nothing until it joins again. Nothing runs there, and it is taken to be as it said last."""
        member = self._members[node]
        self._part_from(member)
        member.agent = None
        member.away.set()

    def lose(self, node: str) -> None:
        """It has gone, and all that ran there. What is under way with it ends."""
        member = self._members.pop(node, None)
        if member is not None:
            self._part_from(member)
            member.lost = True
            member.away.set()
            self._homes = {id: home for id, home in self._homes.items() if home != node}
            self._tell()

    # --- Runtime --------------------------------------------------------------------------------------------------

    async def nodes(self) -> tuple[Node, ...]:
        """As they said last; of those that have just joined, what they say within a second."""
        await self._first_words(ASK_S)
        return tuple(node for member in self._in_order() for node in member.nodes)

    async def start(self, order: Order) -> None:
        node = order.spec.node
        if (member := self._members.get(node)) is None:
            raise LostError(f"{order.id} is to run on {node}, which is not there")

        async def begin(agent: NodeClient) -> None:
            await agent.start(order)
            self._homes[order.id] = node

        await self._carry_out(member, begin)

    async def flip(self, id: str, role: Role) -> None:
        await self._at_home(id, lambda agent: agent.flip(id, role))

    async def share(self, order: Order) -> None:
        await self._at_home(order.id, lambda agent: agent.share(order))

    async def drain(self, id: str) -> None:
        await self._at_home(id, lambda agent: agent.drain(id))

    async def stop(self, id: str, grace_s: float) -> None:
        await self._at_home(id, lambda agent: agent.stop(id, grace_s))

    async def watch(self) -> AsyncIterator[tuple[Observed, ...]]:
        """Not before each node that is joined now has spoken, or has had its time to."""
        await self._first_words(self._first_word_s)
        while True:
            changed = self._changed
            yield tuple(one for member in self._in_order() for one in member.shown() if self._is_home(member, one))
            await changed.wait()

    # --- beyond it ------------------------------------------------------------------------------------------------

    async def groups(self) -> dict[str, int]:
        """Process groups that run now, as `node/name`, of the nodes that answer within a second."""

        async def of(member: _Member, agent: NodeClient) -> dict[str, int]:
            with contextlib.suppress(TimeoutError, EpdError):
                async with asyncio.timeout(ASK_S):
                    told = await until_lost(agent.groups(), member.away)
                    return {f"{member.id}/{name}": pid for name, pid in told.items()}
            return {}

        told = await asyncio.gather(*(of(*one) for one in self._joined() if not one[0].away.is_set()))
        return {name: pid for groups in told for name, pid in groups.items()}

    async def close(self) -> None:
        """End all instances and what they share, on all nodes that answer; returns when nothing of it is left."""

        async def of(member: _Member) -> None:
            with contextlib.suppress(SilentError):
                await self._unless_lost(self._carry_out(member, lambda agent: agent.close()))

        await asyncio.gather(*(of(member) for member, _ in self._joined()))

    async def disconnect(self) -> None:
        """Nothing more is asked. What runs goes on."""
        for node in tuple(self._members):
            self.lose(node)
        await self.parted()

    # --- calls ----------------------------------------------------------------------------------------------------

    async def _at_home(self, id: str, call: Callable[[NodeClient], Awaitable[None]]) -> None:
        """Where it is; where that is unknown, at all that have not said yet what they have."""
        home = self._homes.get(id)
        members = [one for one in self._members.values() if one.id == home or not (home or one.spoken.is_set())]
        await asyncio.gather(*(self._unless_lost(self._carry_out(one, call)) for one in members))

    async def _carry_out(self, member: _Member, call: Callable[[NodeClient], Awaitable[None]]) -> None:
        """Returns when its effect is seen by all who watch. Raises LostError, SilentError."""

        async def called() -> None:
            assert member.agent is not None, "it is not away"
            await call(member.agent)
            self._take_in(member, member.agent, await member.agent.status())

        try:
            if member.away.is_set():
                raise LostError("it is away")
            await until_lost(called(), member.away)
        except LostError:
            if member.lost:
                raise LostError(f"node {member.id} is not there any more") from None
            raise SilentError(f"node {member.id} is silent") from None

    async def _unless_lost(self, doing: Awaitable[None]) -> None:
        """With its node all is gone that it was about."""
        with contextlib.suppress(LostError):
            await doing

    # --- what the nodes say ---------------------------------------------------------------------------------------

    async def _follow(self, member: _Member, agent: NodeClient) -> None:
        """Its next word, or that there is none."""
        try:
            async with asyncio.timeout(self._silent_s):
                seen = await agent.status(member.watched)
        except TimeoutError:
            if not member.away.is_set():
                member.away.set()
                self._say(f"node {member.id} does not answer for {self._silent_s:g} s")
                self._tell()
            return
        if member.away.is_set():
            member.away.clear()
            self._say(f"node {member.id} answers again")
            self._tell()
        if seen is not None:
            member.watched = seen.number
            for line in seen.value.lines:
                self._say(line)
            self._take_in(member, agent, seen)

    def _take_in(self, member: _Member, agent: NodeClient, seen: Seen[NodeStatus] | None) -> None:
        if seen is None or seen.number <= member.heard or member.agent is not agent:  # answers may overtake each other
            return
        had, instances = {one.order.id for one in member.instances}, seen.value.instances
        member.nodes, member.instances, member.heard = seen.value.nodes, instances, seen.number
        for gone in had - {one.order.id for one in instances}:
            if self._homes.get(gone) == member.id:
                del self._homes[gone]
        for one in instances:
            if self._homes.setdefault(one.order.id, member.id) != member.id and one.order.id not in member.leftovers:
                self._say(f"{one.order.id} on {member.id} is ended: {self._homes[one.order.id]} has it")
                stop = asyncio.create_task(self._end_leftover(member, agent, one.order.id))
                member.leftovers[one.order.id] = stop
        member.spoken.set()
        self._tell()

    async def _end_leftover(self, member: _Member, agent: NodeClient, id: str) -> None:
        try:
            await agent.stop(id, LEFTOVER_GRACE_S)
        except EpdError as error:
            self._say(f"{id} on {member.id} cannot be ended: {error}")
        finally:
            member.leftovers.pop(id, None)

    async def _keep_informed(self, member: _Member, agent: NodeClient) -> None:
        """Of the instances of other nodes. Not before these have spoken: it would part its own from them."""
        await self._first_words(self._first_word_s)
        await self.repeat(partial(self._inform, member, agent), f"node {member.id} is not told who is there")

    async def _inform(self, member: _Member, agent: NodeClient) -> None:
        changed, peers = self._changed, self._beyond(member)
        if peers == member.told:
            await changed.wait()
        else:
            await agent.know(peers)
            member.told = peers

    def _beyond(self, member: _Member) -> tuple[Peer, ...]:
        return tuple(
            peer_of(one.instance, one.order.spec.role)
            for other in self._in_order()
            for one in other.instances
            if other is not member and one.instance is not None and self._is_home(other, one)
        )

    async def _first_words(self, wait_s: float) -> None:
        waiting = [
            asyncio.create_task(self._first_word(member)) for member, _ in self._joined() if not member.away.is_set()
        ]
        try:
            if waiting:
                await asyncio.wait(waiting, timeout=wait_s)
        finally:
            for task in waiting:
                task.cancel()

    async def _first_word(self, member: _Member) -> None:
        while not (member.spoken.is_set() or member.lost):
            await self._changed.wait()

    # --- the table ------------------------------------------------------------------------------------------------

    def _joined(self) -> list[tuple[_Member, NodeClient]]:
        return [(one, one.agent) for one in self._in_order() if one.agent is not None]

    def _in_order(self) -> list[_Member]:
        return [self._members[node] for node in sorted(self._members)]

    def _is_home(self, member: _Member, one: Observed) -> bool:
        return self._homes.get(one.order.id) == member.id

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _part_from(self, member: _Member) -> None:
        """Ask its agent of now nothing more."""
        for task in member.leftovers.values():
            task.cancel()
        member.leftovers = {}
        self.drop(member.id)
