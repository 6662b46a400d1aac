"""Streams of bytes through a Node actor, to sockets in the run directory of its node: `deploy.runtime.stream.Open`.

Ray may carry out an actor's calls in another order than they were made, so there is one `write` and one `read` at a
time. A read waits for bytes a while and is asked again: a stream that nobody asks for is closed by the other end.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from ray.exceptions import RayError

from deploy.ray.cluster import Actor
from deploy.runtime.stream import MAX_LINE_BYTES, Open, Writer

CHUNK_BYTES = 64 << 10
"""Ray hands over what is smaller than 100 KB without its object store."""

READ_S = 10.0
FORGOTTEN_S = 15.0
"""From one read to the next, at most."""


def through(find: Callable[[], Awaitable[Actor]], socket: str) -> Open:
    """Streams to the socket of this name.

    Args:
        find: the Node actor, whose node process runs. Raises ConnectionError where there is none.
    """

    async def open_it() -> tuple[asyncio.StreamReader, Writer]:
        actor = await find()
        reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        try:
            number = await actor.open.remote(socket)
        except RayError as error:
            raise ConnectionResetError(f"the node's actor does not answer: {error}") from error
        if number is None:
            raise ConnectionRefusedError(f"nobody answers at {socket}")
        return reader, _RemoteWriter(actor, number, reader)

    return open_it


class _RemoteWriter:
    """A `Writer`, and what fills the reader beside it."""

    def __init__(self, actor: Actor, number: int, reader: asyncio.StreamReader) -> None:
        self._actor = actor
        self._number = number
        self._reader = reader
        self._unwritten = bytearray()
        self._given = asyncio.Event()
        self._closing = False
        self._tasks = [asyncio.create_task(self._write()), asyncio.create_task(self._read())]

    def write(self, data: bytes) -> None:
        self._unwritten += data
        self._given.set()

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            for task in self._tasks:
                task.cancel()
            self._reader.feed_eof()
            self._actor.close.remote(self._number)

    def is_closing(self) -> bool:
        return self._closing

    async def _write(self) -> None:
        with self._closing_at_the_end():
            while True:
                await self._given.wait()
                self._given.clear()
                while self._unwritten:
                    data = bytes(self._unwritten[:CHUNK_BYTES])
                    del self._unwritten[:CHUNK_BYTES]
                    if not await self._actor.write.remote(self._number, data):
                        return

    async def _read(self) -> None:
        with self._closing_at_the_end():
            while (data := await self._actor.read.remote(self._number)) is not None:
                self._reader.feed_data(data)

    @contextlib.contextmanager
    def _closing_at_the_end(self) -> Iterator[None]:
        """Of the stream, or of the actor."""
        with contextlib.suppress(RayError):
            yield
        self.close()


class Streams:
    """The other end, in the Node actor. In its event loop."""

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}
        self._last = 0
        self._sweeping: asyncio.Task[None] | None = None

    async def open(self, path: Path) -> int | None:
        """A stream's number, or None where nobody listens."""
        try:
            reader, writer = await asyncio.open_unix_connection(path, limit=CHUNK_BYTES)
        except (ConnectionError, FileNotFoundError):
            return None
        self._last += 1
        self._open[self._last] = _Open(reader, writer)
        if self._sweeping is None:
            self._sweeping = asyncio.create_task(self._sweep())
        return self._last

    async def read(self, number: int) -> bytes | None:
        """What has come, b"" where nothing has for a while, None at the end."""
        stream = self._open.get(number)
        if stream is None:
            return None
        stream.asked = time.monotonic()
        try:
            async with asyncio.timeout(READ_S):
                return await stream.reader.read(CHUNK_BYTES) or None
        except TimeoutError:
            return b""
        except ConnectionError:
            return None
        finally:
            stream.asked = time.monotonic()

    async def write(self, number: int, data: bytes) -> bool:
        """False at the end. Returns when there is room for more."""
        stream = self._open.get(number)
        if stream is None or stream.writer.is_closing():
            return False
        try:
            stream.writer.write(data)
            await stream.writer.drain()
        except ConnectionError:
            return False
        return True

    def close(self, number: int) -> None:
        if (stream := self._open.pop(number, None)) is not None:
            stream.writer.close()

    async def _sweep(self) -> None:
        """Whoever asked may have been killed."""
        while True:
            await asyncio.sleep(FORGOTTEN_S / 3)
            for number, stream in tuple(self._open.items()):
                if time.monotonic() - stream.asked > FORGOTTEN_S + READ_S:
                    self.close(number)


class _Open:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.asked = time.monotonic()
