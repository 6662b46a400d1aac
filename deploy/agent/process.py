"""The agent as a process of its own: serves its `Runtime` over a socket, until it is killed.

Whoever asked may go and come again, or be another one: what was accepted goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys

from deploy.agent.agent import Agent
from deploy.agent.setup import AgentSetup
from deploy.keeper.interface import Keeper
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

logger = logging.getLogger(__name__)
CRASHED = 70


async def run_agent(setup: AgentSetup, keeper: Keeper, listening: socket.socket, *, controls: bool = False) -> int:
    """An agent in the process that is made for it. Does not return.

    Args:
        listening: the Unix socket on which it is asked. Whoever connects before it listens waits.
        controls: with a signal it ends its stages, and then everything: there is nobody else who would.
    """
    try:
        await serve_agent(setup, keeper, listening, controls=controls)
    except BaseException:  # not by unwinding: that would end the stages, with which the next agent goes on
        logger.exception("the agent has failed")
    sys.stderr.flush()
    os._exit(CRASHED)


async def serve_agent(setup: AgentSetup, keeper: Keeper, listening: socket.socket, *, controls: bool = False) -> None:
    """Adopt what is there, then serve, until cancelled. `controls`: as of `run_agent`."""

    async def carry_out(number: int, call: Call, asker: Asker) -> Done:
        return await _carry_out(agent, number, call, asker)

    answering = Answering(to_agent, setup.run.path, carry_out)
    agent = Agent(setup, keeper, say=answering.say)
    async with agent.running(), answering.served(listening) as server:
        ending = asyncio.create_task(_end_by_signal(agent, keeper)) if controls else None
        await keeper.ready()
        try:
            await server.serve_forever()
        finally:
            if ending is not None:
                ending.cancel()


async def _end_by_signal(agent: Agent, keeper: Keeper) -> None:
    async for _ in keeper.signals():
        await agent.close()
        await keeper.over(0)


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
