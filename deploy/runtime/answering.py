"""The end of a conversation that answers: whoever connects to its socket, any number of them, each as long as it stays.

What was accepted goes on when whoever asked has gone. Lines for the operator go to those who watch; where nobody does,
to stderr. Where those who decide may have rivals (a controller that is cut off, and the one that has followed it), the
latest epoch counts: who comes with an earlier one, or is still connected, is told that it is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from deploy.runtime.stream import MAX_LINE_BYTES, Epoch, GiveUp, Line, Refused, Request, Superseded, line_of
from epd_serve.errors import ConfigError, EpdError

logger = logging.getLogger(__name__)

UNREAD_BYTES = 1 << 20
"""Of lines for the operator that one who watches has not taken: then it gets no more of them until it has."""

EPOCH = "epoch"
"""In the run directory: the latest, once there is one."""


class Asker:
    """One who is connected."""

    def __init__(self, writer: asyncio.StreamWriter, watching: list[asyncio.StreamWriter]) -> None:
        self._writer = writer
        self._watching = watching

    @property
    def gone(self) -> bool:
        return self._writer.is_closing()

    async def tell(self, answer: Any) -> None:
        """One of several answers. Whoever is slow is told less often."""
        self._writer.write(line_of(answer))
        await self._writer.drain()

    @contextlib.contextmanager
    def watches(self) -> Iterator[None]:
        """It is told the lines for the operator meanwhile."""
        self._watching.append(self._writer)
        try:
            yield
        finally:
            self._watching.remove(self._writer)


CarryOut = Callable[[int, Any, Asker], Awaitable[Any]]
"""Does what a call of this number asks, and returns the last answer. Raises ConfigError: it is refused."""


class Answering:
    """Args:
    requests: decodes what is asked.
    folder: the run directory.
    """

    def __init__(self, requests: msgspec.json.Decoder[Any], folder: Path, carry_out: CarryOut) -> None:
        self._requests = requests
        self._epoch_file = folder / EPOCH
        self._epoch = int(self._epoch_file.read_text("ascii")) if self._epoch_file.exists() else 0
        self._carry_out = carry_out
        self._connected: dict[asyncio.StreamWriter, int] = {}
        self._watching: list[asyncio.StreamWriter] = []

    def say(self, line: str) -> None:
        """To the operator. Whoever is slow misses lines."""
        listening = {writer for writer in self._watching if not writer.is_closing()}
        for writer in listening:
            if writer.transport.get_write_buffer_size() < UNREAD_BYTES:
                writer.write(line_of(Line(line)))
        if not listening:
            print(line, file=sys.stderr, flush=True)

    @contextlib.asynccontextmanager
    async def served(self, listening: socket.socket) -> AsyncIterator[asyncio.Server]:
        """Whoever connects there. At the end all connections are closed."""
        server = await asyncio.start_unix_server(self._attend, sock=listening, limit=MAX_LINE_BYTES)
        try:
            yield server
        finally:
            server.close()
            for writer in self._connected:
                writer.close()

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One of them, until it goes."""
        asked: dict[int, asyncio.Task[None]] = {}
        self._connected[writer] = 0
        try:
            while (line := await reader.readline()).endswith(b"\n"):
                request: Request[Any] = self._requests.decode(line)
                if isinstance(request.call, Epoch):
                    self._connected[writer] = request.call.epoch
                    self._begin(request.call.epoch)
                if self._connected[writer] < self._epoch:
                    writer.write(line_of(Superseded(self._epoch)))
                    return
                if isinstance(request.call, GiveUp):
                    if (given_up := asked.get(request.number)) is not None:
                        given_up.cancel()
                elif not isinstance(request.call, Epoch):
                    answering = asyncio.create_task(self._answer(request, writer))
                    asked[request.number] = answering
                    answering.add_done_callback(partial(_forget, asked, request.number))
                await writer.drain()  # who takes no answers is heard no further
        except ConnectionError:
            pass
        finally:
            for task in asked.values():
                task.cancel()
            writer.close()
            del self._connected[writer]

    def _begin(self, epoch: int) -> None:
        """Nothing, where it has begun already."""
        if epoch <= self._epoch:
            return
        unnamed = self._epoch_file.with_suffix(".new")
        unnamed.write_text(str(epoch), "ascii")
        unnamed.rename(self._epoch_file)
        self._epoch = epoch
        for writer, of_it in self._connected.items():
            if of_it < epoch:
                writer.write(line_of(Superseded(epoch)))
                writer.close()

    async def _answer(self, request: Request[Any], writer: asyncio.StreamWriter) -> None:
        answer: Any
        try:
            answer = await self._carry_out(request.number, request.call, Asker(writer, self._watching))
        except ConfigError as error:
            answer = Refused(request.number, error.message, error.param)
        except EpdError as error:
            answer = Refused(request.number, error.message, error.param, config=False)
        except ConnectionError:
            return
        except Exception as error:
            logger.exception("%s failed", type(request.call).__name__)
            answer = Refused(request.number, f"{type(error).__name__}: {error}", config=False)
        if not writer.is_closing():
            writer.write(line_of(answer))


def _forget(asked: dict[int, asyncio.Task[None]], number: int, _: asyncio.Task[None]) -> None:
    del asked[number]
