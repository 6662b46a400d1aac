"""Streams through a Node actor, without Ray: its calls are answered by the other end in this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from deploy.ray import streams
from deploy.ray.streams import Streams, through
from deploy.runtime.stream import Open

pytestmark = pytest.mark.asyncio
Attend = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class _Method:
    def __init__(self, call: Callable[..., Any]) -> None:
        self.remote = call


class FakeActor:
    """`fails`: from now on nobody answers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.streams = Streams()
        self.fails = False
        self.open, self.close = _Method(self._open), _Method(self._close)
        self.read, self.write = _Method(self._asked(self.streams.read)), _Method(self._asked(self.streams.write))

    async def _open(self, socket: str) -> int | None:
        return await self.streams.open(self._folder / socket)

    def _close(self, number: int) -> None:
        self.streams.close(number)

    def _asked(self, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def answered(*values: Any) -> Any:
            if self.fails:
                raise ActorDiedError
            return await call(*values)

        return answered


@contextlib.asynccontextmanager
async def listening(folder: Path, attend: Attend) -> AsyncIterator[tuple[FakeActor, Open]]:
    actor = FakeActor(folder)

    async def find() -> FakeActor:
        return actor

    server = await asyncio.start_unix_server(attend, path=folder / "echo.sock", limit=1 << 20)
    try:
        yield actor, through(find, "echo.sock")
    finally:
        server.close()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()


async def test_what_is_written_comes_back_whole_and_in_order(tmp_path: Path) -> None:
    async with listening(tmp_path, echo) as (_, open_it), asyncio.timeout(10):
        reader, writer = await open_it()
        sent = b"".join(f"{number:08}\n".encode() for number in range(100_000))
        for at in range(0, len(sent), 5_000):
            writer.write(sent[at : at + 5_000])
        assert await reader.readexactly(len(sent)) == sent
        writer.close()


async def test_nobody_who_listens_is_a_connection_error(tmp_path: Path) -> None:
    actor = FakeActor(tmp_path)

    async def find() -> FakeActor:
        return actor

    with pytest.raises(ConnectionError):
        await through(find, "nobody.sock")()


async def test_the_end_of_who_listens_is_the_end_of_the_stream(tmp_path: Path) -> None:
    async def leave(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"last words")
        writer.close()

    async with listening(tmp_path, leave) as (_, open_it), asyncio.timeout(10):
        reader, writer = await open_it()
        assert await reader.read() == b"last words"
        assert writer.is_closing()


async def test_an_actor_that_dies_is_the_end_of_the_stream(tmp_path: Path) -> None:
    async with listening(tmp_path, echo) as (actor, open_it), asyncio.timeout(10):
        reader, writer = await open_it()
        writer.write(b"a")
        assert await reader.readexactly(1) == b"a"
        actor.fails = True
        writer.write(b"b")
        assert await reader.read() == b""
        assert writer.is_closing()


async def test_who_closes_a_stream_ends_it_at_the_other_end(tmp_path: Path) -> None:
    ended = asyncio.Event()

    async def attend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        ended.set()
        writer.close()

    async with listening(tmp_path, attend) as (_, open_it), asyncio.timeout(10):
        _, writer = await open_it()
        writer.close()
        await ended.wait()


async def test_a_stream_that_nobody_reads_any_more_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "FORGOTTEN_S", 0.1)
    monkeypatch.setattr(streams, "READ_S", 0.1)
    ended = asyncio.Event()

    async def attend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        ended.set()
        writer.close()

    async with listening(tmp_path, attend) as (actor, _), asyncio.timeout(10):
        number = await actor.streams.open(tmp_path / "echo.sock")
        assert number is not None
        await ended.wait()
        assert await actor.streams.read(number) is None


async def test_a_stream_that_is_read_stays_however_little_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "FORGOTTEN_S", 0.1)
    monkeypatch.setattr(streams, "READ_S", 0.05)
    async with listening(tmp_path, echo) as (_, open_it), asyncio.timeout(10):
        reader, writer = await open_it()
        await asyncio.sleep(0.5)
        writer.write(b"still here")
        assert await reader.readexactly(10) == b"still here"
        writer.close()
