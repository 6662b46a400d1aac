"""The agent as a process of its own: serves its `Runtime` over a socket, until it is killed.

Whoever asked may go and come again, or be another one: what was accepted goes on. Lines for the operator go to those
who watch; where nobody does, to stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from functools import partial

from deploy.agent.agent import Agent
from deploy.agent.setup import AgentSetup
from deploy.keeper.interface import Keeper
from deploy.runtime.messages import (
    MAX_LINE_BYTES,
    Answer,
    Call,
    Close,
    Done,
    Drain,
    Flip,
    GiveUp,
    Groups,
    Know,
    Line,
    Nodes,
    Refused,
    Seen,
    Start,
    Stop,
    Watch,
    line_of,
    to_agent,
)
from epd_serve.errors import ConfigError

logger = logging.getLogger(__name__)
CRASHED = 70


async def run_agent(setup: AgentSetup, keeper: Keeper, listening: socket.socket) -> int:
    """An agent in the process that is made for it. Does not return.

    Args:
        listening: the Unix socket on which it is asked. Whoever connects before it listens waits.
    """
    try:
        await serve_agent(setup, keeper, listening)
    except BaseException:  # not by unwinding: that would end the stages, with which the next agent goes on
        logger.exception("the agent has failed")
    sys.stderr.flush()
    os._exit(CRASHED)


async def serve_agent(setup: AgentSetup, keeper: Keeper, listening: socket.socket) -> None:
    """Adopt what is there, then serve, until cancelled."""
    served = _Served()
    agent = Agent(setup, keeper, say=served.say)
    async with agent.running():
        served.agent = agent
        server = await asyncio.start_unix_server(served.attend, sock=listening, limit=MAX_LINE_BYTES)
        await keeper.ready()
        try:
            await server.serve_forever()
        finally:
            served.close()


def _forget(asked: dict[int, asyncio.Task[None]], number: int, _: asyncio.Task[None]) -> None:
    del asked[number]


class _Served:
    """Those who ask."""

    agent: Agent

    def __init__(self) -> None:
        self._connected: set[asyncio.StreamWriter] = set()
        self._watching: list[asyncio.StreamWriter] = []

    def say(self, line: str) -> None:
        """To the operator."""
        listening = {writer for writer in self._watching if not writer.is_closing()}
        for writer in listening:
            writer.write(line_of(Line(line)))
        if not listening:
            print(line, file=sys.stderr, flush=True)

    async def attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One of them, until it goes."""
        asked: dict[int, asyncio.Task[None]] = {}
        self._connected.add(writer)
        try:
            while (line := await reader.readline()).endswith(b"\n"):
                request = to_agent.decode(line)
                if isinstance(request.call, GiveUp):
                    if (given_up := asked.get(request.number)) is not None:
                        given_up.cancel()
                else:
                    answering = asyncio.create_task(self._answer(request.number, request.call, writer))
                    asked[request.number] = answering
                    answering.add_done_callback(partial(_forget, asked, request.number))
        except ConnectionError:
            pass
        finally:
            for task in asked.values():
                task.cancel()
            writer.close()
            self._connected.remove(writer)

    def close(self) -> None:
        """Of all of them."""
        for writer in self._connected:
            writer.close()

    async def _answer(self, number: int, call: Call, writer: asyncio.StreamWriter) -> None:
        answer: Answer
        try:
            answer = await self._carry_out(number, call, writer)
        except ConfigError as error:
            answer = Refused(number, error.message, error.param)
        except ConnectionError:
            return
        except Exception as error:
            logger.exception("%s failed", type(call).__name__)
            answer = Refused(number, f"{type(error).__name__}: {error}", config=False)
        if not writer.is_closing():
            writer.write(line_of(answer))

    async def _carry_out(self, number: int, call: Call, writer: asyncio.StreamWriter) -> Done:
        agent = self.agent
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
                await self._watch(number, writer)
        return Done(number)

    async def _watch(self, number: int, writer: asyncio.StreamWriter) -> None:
        self._watching.append(writer)
        try:
            async with contextlib.aclosing(self.agent.watch()) as items:
                async for item in items:
                    if writer.is_closing():
                        return
                    writer.write(line_of(Seen(number, item)))
                    await writer.drain()  # whoever is slow is told less often
        finally:
            self._watching.remove(writer)
