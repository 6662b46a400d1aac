"""The runtime of this host as others see it: the agent, another process, which may be killed and started again.

The agent that a call was told to may be gone before it has answered: every call can be repeated, so it is, with the
next agent, until an answer comes. How long that may take is for the caller to say.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from pathlib import Path

from deploy.runtime.messages import (
    MAX_LINE_BYTES,
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
    Request,
    Seen,
    Start,
    Stop,
    Watch,
    from_agent,
    line_of,
)
from deploy.runtime.protocol import Node, Observed, Order
from epd_serve.errors import ConfigError, EpdError
from epd_serve.peers import Peer
from epd_serve.roles import Role

RETRY_S = 0.05


class AgentError(EpdError):
    """The agent has failed at a call. It may be repeated."""

    retryable = True


class LocalRuntime:
    """A `Runtime`. Connects when it is first asked something, and again when the agent has gone.

    Args:
        path: of the agent's socket.
        say: takes a line for the operator; told as long as somebody watches.
    """

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._path = path
        self._say = say
        self._connection: _Connection | None = None
        self._one_at_a_time = asyncio.Lock()

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

    async def know(self, peers: tuple[Peer, ...]) -> None:
        """These instances, and no others, are there on other nodes. Agents that follow know it, too."""
        await self._ask(Know(peers))

    async def watch(self) -> AsyncIterator[tuple[Observed, ...]]:
        while True:
            try:
                async with contextlib.aclosing((await self._connected()).watch()) as items:
                    async for item in items:
                        yield item
            except ConnectionError:
                await asyncio.sleep(RETRY_S)

    async def groups(self) -> dict[str, int]:
        """Process groups that run now: of the instances, of the template, of Mooncake's master, by name."""
        return (await self._ask(Groups())).groups

    async def close(self) -> None:
        """End all instances and what they share; returns when nothing of it is left."""
        await self._ask(Close())

    async def disconnect(self) -> None:
        """Nothing more is asked."""
        if self._connection is not None:
            await self._connection.close()

    async def _ask(self, call: Call) -> Done:
        """Raises ConfigError or AgentError, as the agent says."""
        while True:
            try:
                return await (await self._connected()).ask(call)
            except ConnectionError:
                await asyncio.sleep(RETRY_S)

    async def _connected(self) -> _Connection:
        async with self._one_at_a_time:
            while self._connection is None or self._connection.gone:
                try:
                    reader, writer = await asyncio.open_unix_connection(self._path, limit=MAX_LINE_BYTES)
                except (ConnectionError, FileNotFoundError):
                    await asyncio.sleep(RETRY_S)
                else:
                    self._connection = _Connection(reader, writer, self._say)
            return self._connection


class _Connection:
    """With one life of the agent. Calls raise ConnectionError when that is over."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, say: Callable[[str], None]) -> None:
        self._reader = reader
        self._writer = writer
        self._say = say
        self._numbers = itertools.count(1)
        self._asked: dict[int, _Answers] = {}
        self._hearing = asyncio.create_task(self._hear(), name="agent")

    @property
    def gone(self) -> bool:
        return self._writer.is_closing()

    async def ask(self, call: Call) -> Done:
        """Raises ConfigError or AgentError, as the agent says."""
        with self._asking(call) as (_, answers):
            answer = await answers.next()
        assert isinstance(answer, Done), "a call's answer"
        return answer

    async def watch(self) -> AsyncGenerator[tuple[Observed, ...]]:
        """What it says of all instances. What nobody has taken is replaced by what comes after it."""
        with self._asking(Watch()) as (number, answers):
            try:
                while True:
                    answer = await answers.next()
                    assert isinstance(answer, Seen), "a watch's answer"
                    yield answer.instances
            finally:
                with contextlib.suppress(ConnectionError):
                    self._send(Request(number, GiveUp()))

    async def close(self) -> None:
        self._hearing.cancel()
        await asyncio.wait([self._hearing])

    @contextlib.contextmanager
    def _asking(self, call: Call) -> Iterator[tuple[int, _Answers]]:
        number = next(self._numbers)
        answers = self._asked[number] = _Answers()
        try:
            self._send(Request(number, call))
            yield number, answers
        finally:
            del self._asked[number]

    def _send(self, request: Request) -> None:
        if self._writer.is_closing():
            raise ConnectionResetError("the agent has gone")
        self._writer.write(line_of(request))

    async def _hear(self) -> None:
        try:
            while (line := await self._reader.readline()).endswith(b"\n"):
                answer = from_agent.decode(line)
                if isinstance(answer, Line):
                    self._say(answer.text)
                elif answer.number in self._asked:
                    self._asked[answer.number].put(answer)
        except ConnectionError:
            pass
        finally:
            self._writer.close()
            for answers in self._asked.values():
                answers.put(None)


class _Answers:
    """To one call: the newest, until it is taken."""

    def __init__(self) -> None:
        self._newest: Done | Seen | Refused | None = None
        self._come = asyncio.Event()

    def put(self, answer: Done | Seen | Refused | None) -> None:
        """None: there will be no more."""
        self._newest = answer
        self._come.set()

    async def next(self) -> Done | Seen:
        """Raises ConfigError or AgentError, as the agent says, or ConnectionError."""
        await self._come.wait()
        self._come.clear()
        answer = self._newest
        if answer is None:
            raise ConnectionResetError("the agent has gone")
        if isinstance(answer, Refused):
            raise ConfigError(answer.message, param=answer.param) if answer.config else AgentError(answer.message)
        return answer
