"""A keeper that is another process, as the parts of the deployment see it that it has forked."""

from __future__ import annotations

import asyncio
import contextlib
import select
import signal
import socket
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from deploy.host import processes
from deploy.keeper import messages
from deploy.keeper.interface import Child, Entry, Signals
from deploy.keeper.messages import Answer, Event, PartRow, Request, decode_told, encode
from epd_serve.packets import close_all, receive_packet, send_packet

MOST_ASKED = 64
"""So many requests wait for their answers at a time: a keeper ends a part to which it can say nothing more."""

ANSWER_S = 10
"""For the keeper to take or answer one in a burst of more."""


class KeeperClient:
    """A `Keeper` that is another process, our parent. A context manager, in the event loop's thread.

    A request is sent before the call first waits, so that they are carried out in the order of the calls.
    """

    def __init__(self, channel: socket.socket, keeper_pid: int) -> None:
        channel.setblocking(False)
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
        message = encode(request)
        while len(self._asked) >= MOST_ASKED:
            self._wait([self._channel], [])
            self._hear()
        try:
            send_packet(self._channel, message, descriptors)
        except BlockingIOError:
            self._wait([], [self._channel])
            send_packet(self._channel, message, descriptors)
        asked = _Asked(request, asyncio.get_running_loop().create_future())
        self._asked.append(asked)
        return asked.answered

    def _wait(self, to_hear: Sequence[socket.socket], to_ask: Sequence[socket.socket]) -> None:
        """In a burst of requests. Raises TimeoutError: the keeper is stopped."""
        if not any(select.select(to_hear, to_ask, [], ANSWER_S)):
            raise TimeoutError(f"the keeper takes no request for {ANSWER_S} s")

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
                message, descriptors = receive_packet(self._channel)
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
