"""The agent of a node as others ask it: its `Runtime` over a socket, for those who are on other machines.

Whoever asked may go and come again, or be another one: what was accepted goes on.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator

from deploy.agent.agent import Agent
from deploy.agent.setup import AgentSetup
from deploy.host.children import Children
from deploy.host.state import State
from deploy.runtime.answering import Answering, Asker
from deploy.runtime.messages import (
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
    to_agent,
)


@contextlib.asynccontextmanager
async def served_agent(
    setup: AgentSetup, children: Children, state: State, listening: socket.socket
) -> AsyncIterator[Agent]:
    """An agent that goes on with what there is, and answers there as long as this is open.

    Args:
        listening: the Unix socket on which it is asked. Whoever connects before it listens waits.
    """

    async def carry_out(number: int, call: Call, asker: Asker) -> Done:
        return await _carry_out(agent, number, call, asker)

    answering = Answering(to_agent, setup.run.path, carry_out)
    agent = Agent(setup, children, state, say=answering.say)
    async with agent.running(), answering.served(listening):
        yield agent


async def _carry_out(agent: Agent, number: int, call: Call, asker: Asker) -> Done:
    match call:
        case Start(order):
            await agent.start(order)
        case Flip(name, role):
            await agent.flip(name, role)
        case Drain(name):
            await agent.drain(name)
        case Stop(name, grace_s):
            await agent.stop(name, grace_s)
        case Know(peers):
            await agent.know(peers)
        case Nodes():
            return Done(number, nodes=await agent.nodes())
        case Groups():
            return Done(number, groups=await agent.groups())
        case Close():
            await agent.close()
        case Watch():
            with asker.watches():
                async with contextlib.aclosing(agent.watch()) as items:
                    async for item in items:
                        if asker.gone:
                            break
                        await asker.tell(Seen(number, item))
    return Done(number)
