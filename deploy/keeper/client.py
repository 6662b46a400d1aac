"""A keeper as those see it who decide what runs: their own process, or another one that outlives them.

The interface is one (`Keeper`), so that a stage joined to a cluster, which has no process for this, and a deployment,
whose stages go on when agent or controller die, start and watch their processes in the same way.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from deploy.host import processes
from deploy.keeper import messages
from deploy.keeper.children import Children, Kept
from deploy.keeper.messages import Answer, Event, PartRow, Request, decode_told, encode
from epd_serve.packets import close_all, receive_packet, send_packet

POLL_S = 0.05
ANSWER_S = 10
"""For the kernel to take a request. A keeper that is stopped takes some hundred."""


class Child:
    """A process that somebody keeps: the leader of its own session and process group.

    Args:
        tag: that of its entry when it began.
        look: called before each answer, where nobody else tells of the end.
    """

    def __init__(
        self, name: str, tag: bytes, pid: int, code: int | None = None, look: Callable[[], None] | None = None
    ) -> None:
        self.name = name
        self.tag = tag
        self.pid = pid
        self._code = code
        self._look = look
        self._ended = asyncio.Event()

    def poll(self) -> int | None:
        """Its exit code, or minus the signal that has ended it; None while it runs."""
        if self._code is None and self._look is not None:
            self._look()
        return self._code

    async def exited(self) -> int:
        """Wait for its end. The caller bounds the wait."""
        while (code := self.poll()) is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S if self._look is not None else None):
                    await self._ended.wait()
        return code

    def end(self, code: int) -> None:
        """It has ended."""
        self._code = code
        self._ended.set()


@dataclass(frozen=True)
class Entry:
    """What is kept under a name.

    Attributes:
        tag: as it was noted last; says nothing to the keeper.
        pid: of the last process; None where there was none.
        code: how that ended; None while it runs.
        descriptor: a copy of the one that was noted, which whoever asked for it closes.
        child: the process, also one that has ended.
    """

    name: str
    tag: bytes
    pid: int | None
    code: int | None
    descriptor: int | None
    child: Child | None


class Keeper(Protocol):
    """Requests are made in the order of the calls. Each raises OSError when the keeper has gone.

    Attributes:
        pid: of the process whose children they are: with that one they die.
    """

    pid: int

    async def spawn(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        output: int,
        passed: Sequence[int] = (),
        tag: bytes = b"",
    ) -> Child:
        """Start a program in a session of its own, with an empty stdin, under a name that does not run.

        Args:
            output: descriptor that becomes its stdout and stderr.
            passed: descriptors that it finds as 3, 4, 5 and so on.
            tag: of the entry; an empty one leaves what was noted before, as the noted descriptor is left.

        Raises:
            ValueError: the name runs. OSError: the program cannot be executed.
        """

    async def adopt(self, name: str, pid: int, *, tag: bytes = b"") -> Child:
        """Keep a process that has become the keeper's child because its own parent has ended.

        Raises:
            ValueError: the name runs, or the process has one. ProcessLookupError: no living child of the keeper.
        """

    async def note(self, name: str, tag: bytes, descriptor: int | None = None) -> None:
        """Set the tag of an entry, and a copy of the descriptor, if there is one. Makes an entry that is missing."""

    async def forget(self, name: str) -> None:
        """Remove an entry, if there is one.

        Raises:
            ValueError: it runs.
        """

    async def entries(self) -> tuple[Entry, ...]:
        """All that this part of the deployment has had kept, whichever life of it, in the order of making."""

    def signals(self) -> AsyncIterator[int]:
        """What the operator has sent to the deployment, at once and ever after: also what an earlier life was told."""

    async def parts(self) -> tuple[PartRow, ...]:
        """The parts of the deployment; none where this process is all of it."""

    async def ready(self) -> None:
        """This part does its work. Should it end from now on it is started again, however often."""

    async def over(self, code: int) -> None:
        """All that is left is to be killed, and the deployment to end with this exit code. For the controller alone."""


class Signals:
    """Those that have come, for whoever asks whenever."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._come = asyncio.Event()

    def add(self, number: int) -> None:
        self._numbers.append(number)
        self._come.set()

    async def follow(self) -> AsyncIterator[int]:
        """For one who asks at a time."""
        told = 0
        while True:
            while told < len(self._numbers):
                told += 1
                yield self._numbers[told - 1]
            self._come.clear()
            await self._come.wait()


class InProcess:
    """A `Keeper` whose children are this process's own. It collects no child but those, and only when asked for one.

    Attributes:
        code: what `over` has said: to end is for whoever has made this.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.code: int | None = None
        self._children = Children()
        self._running: dict[str, Child] = {}
        self._signals = Signals()

    async def spawn(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        output: int,
        passed: Sequence[int] = (),
        tag: bytes = b"",
    ) -> Child:
        self._collect()
        return self._runs(self._children.spawn(name, argv, env, output=output, passed=passed, tag=tag))

    async def adopt(self, name: str, pid: int, *, tag: bytes = b"") -> Child:
        self._collect()
        return self._runs(self._children.adopt(name, pid, tag=tag))

    async def note(self, name: str, tag: bytes, descriptor: int | None = None) -> None:
        self._children.note(name, tag, descriptor)

    async def forget(self, name: str) -> None:
        self._collect()
        self._children.forget(name)
        self._running.pop(name, None)

    async def entries(self) -> tuple[Entry, ...]:
        self._collect()
        return tuple(
            Entry(
                kept.name,
                kept.tag,
                kept.pid,
                kept.code,
                None if kept.descriptor is None else os.dup(kept.descriptor),
                self._running.get(kept.name),
            )
            for kept in self._children.kept.values()
        )

    def signals(self) -> AsyncIterator[int]:
        return self._signals.follow()

    def tell(self, number: int) -> None:
        """A signal has come."""
        self._signals.add(number)

    async def parts(self) -> tuple[PartRow, ...]:
        return ()

    async def ready(self) -> None:
        """Nobody starts this process again."""

    async def over(self, code: int) -> None:
        self.code = code

    def close(self) -> None:
        """Close the noted descriptors. Processes go on: to end them is for those who had them started."""
        self._children.close()

    def _runs(self, kept: Kept) -> Child:
        assert kept.pid is not None, "it has just begun"
        self._running[kept.name] = child = Child(kept.name, kept.tag, kept.pid, look=self._collect)
        return child

    def _collect(self) -> None:
        for ended in self._children.collect():
            self._running[ended.name].end(ended.code)


class KeeperClient:
    """A `Keeper` that is another process, our parent. A context manager, in the event loop's thread.

    It asks by a call that waits until the kernel has taken the request, which it does at once: the keeper never waits.
    """

    def __init__(self, channel: socket.socket, keeper_pid: int) -> None:
        channel.setblocking(True)
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", ANSWER_S, 0))
        self.pid = keeper_pid
        self._channel = channel
        self._children: dict[str, Child] = {}
        self._signals = Signals()
        self._asked: deque[_Asked] = deque()

    def __enter__(self) -> Self:
        asyncio.get_running_loop().add_reader(self._channel, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        self._part(ConnectionAbortedError("the connection to the keeper is closed"))

    async def spawn(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        output: int,
        passed: Sequence[int] = (),
        tag: bytes = b"",
    ) -> Child:
        return await self._begin(messages.Spawn(name, argv, env, tag), output, *passed)

    async def adopt(self, name: str, pid: int, *, tag: bytes = b"") -> Child:
        return await self._begin(messages.Adopt(name, pid, tag))

    async def note(self, name: str, tag: bytes, descriptor: int | None = None) -> None:
        await self._ask(messages.Note(name, tag), *(() if descriptor is None else (descriptor,)))

    async def forget(self, name: str) -> None:
        await self._ask(messages.Forget(name))

    async def entries(self) -> tuple[Entry, ...]:
        listed, descriptors = await self._ask(messages.List())
        assert isinstance(listed, messages.Listed), "that was the question"
        stored = iter(descriptors)
        return tuple(
            Entry(row.name, row.record, row.pid, row.code, next(stored) if row.stored else None, self._child(row))
            for row in listed.rows
        )

    async def parts(self) -> tuple[PartRow, ...]:
        listed, descriptors = await self._ask(messages.List())
        assert isinstance(listed, messages.Listed), "that was the question"
        close_all(descriptors)
        return tuple(listed.parts)

    def signals(self) -> AsyncIterator[int]:
        return self._signals.follow()

    async def ready(self) -> None:
        await self._ask(messages.Ready())

    async def over(self, code: int) -> None:
        await self._ask(messages.Over(code))

    # --- questions and answers ------------------------------------------------------------------------------------

    def _send(self, request: Request, *descriptors: int) -> asyncio.Future[_Answered]:
        send_packet(self._channel, encode(request), descriptors)
        asked = _Asked(request, asyncio.get_running_loop().create_future())
        self._asked.append(asked)
        return asked.answered

    async def _ask(self, request: Request, *descriptors: int) -> _Answered:
        """Asks before it waits. Raises what the keeper has against it, or OSError: the keeper has gone."""
        return await self._send(request, *descriptors)

    async def _begin(self, request: messages.Spawn | messages.Adopt, *descriptors: int) -> Child:
        """The process, once it is there. When the caller gives up meanwhile it is ended: nobody else would know it."""
        answered = self._send(request, *descriptors)
        try:
            await asyncio.shield(answered)
        except asyncio.CancelledError:
            with contextlib.suppress(OSError, ValueError):
                await answered
                processes.signal_group(self._children[request.name].pid, signal.SIGKILL)
                await self._children[request.name].exited()
            raise
        return self._children[request.name]

    def _hear(self) -> None:
        """What the keeper has said."""
        while True:
            try:
                message, descriptors = receive_packet(self._channel, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except (EOFError, OSError) as error:
                self._part(ConnectionResetError(f"the keeper has gone: {error}"))
                return
            self._on_told(decode_told(message), descriptors)

    def _on_told(self, told: Answer | Event, descriptors: list[int]) -> None:
        match told:
            case messages.Signalled(number):
                self._signals.add(number)
            case messages.Exited(name, pid, code):
                child = self._children.get(name)
                if child is not None and child.pid == pid:
                    child.end(code)
            case _:
                self._on_answer(self._asked.popleft(), told, descriptors)

    def _on_answer(self, asked: _Asked, answer: Answer, descriptors: list[int]) -> None:
        match asked.request, answer:  # now: the end of what has begun may be told next
            case (messages.Spawn(name=name) | messages.Adopt(name=name)) as request, messages.Done(pid):
                self._children[name] = Child(name, request.record, pid)
        if asked.answered.done():  # whoever asked has given up
            close_all(descriptors)
        elif isinstance(answer, messages.Refused):
            asked.answered.set_exception(answer.error())
        else:
            asked.answered.set_result((answer, descriptors))

    def _child(self, row: messages.Row) -> Child | None:
        """The process of an entry, which an earlier life of this part may have had started."""
        if row.pid is None:
            return None
        child = self._children.get(row.name)
        if child is None or child.pid != row.pid:
            child = self._children[row.name] = Child(row.name, row.record, row.pid)
        if row.code is not None:
            child.end(row.code)
        return child

    def _part(self, error: OSError) -> None:
        if self._channel.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._channel)
            self._channel.close()
        for asked in self._asked:
            if not asked.answered.done():
                asked.answered.set_exception(error)
        self._asked.clear()


_Answered = tuple[Answer, list[int]]


@dataclass(frozen=True)
class _Asked:
    request: Request
    answered: asyncio.Future[_Answered]
