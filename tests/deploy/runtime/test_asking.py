"""Asking over streams: each life of the other end, and of several who decide the one of the latest epoch."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from deploy.runtime.answering import EPOCH, Answering, Asker
from deploy.runtime.asking import SupersededError
from deploy.runtime.client import AgentClient
from deploy.runtime.messages import Call, Done, Know, Nodes, Seen, Watch, to_agent
from deploy.runtime.stream import Request, line_of, unix_socket
from epd_serve.peers import Peer
from epd_serve.roles import Role
from tests.waiting import PATIENCE_S, until


class Answers:
    """Stands in for an agent on `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[Call] = []

    async def carry_out(self, number: int, call: Call, asker: Asker) -> Done:
        self.asked.append(call)
        if isinstance(call, Watch):
            with asker.watches():
                await asker.tell(Seen(number, ()))
                await asyncio.get_running_loop().create_future()
        return Done(number)

    @contextlib.asynccontextmanager
    async def served(self) -> AsyncIterator[Answering]:
        """One life of it."""
        path = self.folder / "agent.sock"
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))
            listening.listen()
            answering = Answering(to_agent, self.folder, self.carry_out)
            async with answering.served(listening):
                yield answering

    def client(self, epoch: int = 0) -> AgentClient:
        return AgentClient(unix_socket(self.folder / "agent.sock"), print, epoch)


async def within(what: Any) -> Any:
    return await asyncio.wait_for(what, PATIENCE_S)


async def test_whoever_decided_before_is_told_that_it_is_over(tmp_path: Path) -> None:
    answers = Answers(tmp_path)
    async with answers.served():
        first, second = answers.client(1), answers.client(2)
        async with contextlib.aclosing(first.watch()) as watch:  # type: ignore[type-var]
            assert await within(anext(watch)) == ()
            await within(second.nodes())
            with pytest.raises(SupersededError):
                await within(anext(watch))
        with pytest.raises(SupersededError):
            await within(first.stop("P0", 1.0))
        await within(second.nodes())
        assert len(answers.asked) == 3, "what the first one asked was not done"
        await first.disconnect()
        await second.disconnect()


async def test_who_comes_late_with_an_earlier_epoch_is_refused_by_the_next_life_too(tmp_path: Path) -> None:
    answers = Answers(tmp_path)
    async with answers.served():
        latest = answers.client(7)
        await within(latest.nodes())
        await latest.disconnect()
    assert (tmp_path / EPOCH).read_text() == "7"
    async with answers.served():
        for epoch in (0, 6):
            with pytest.raises(SupersededError):
                await within(answers.client(epoch).nodes())
        same = answers.client(7)
        await within(same.nodes())
        await same.disconnect()


async def test_each_life_is_told_first_who_is_there_elsewhere(tmp_path: Path) -> None:
    answers = Answers(tmp_path)
    client, peers = answers.client(1), (Peer("D0", Role.D),)
    async with answers.served():
        await within(client.know(peers))
    answers.asked.clear()
    async with answers.served():
        await within(client.nodes())
        assert answers.asked[0] == Know(peers)
        await client.disconnect()


async def test_lines_for_the_operator_reach_who_watches(tmp_path: Path) -> None:
    answers, lines = Answers(tmp_path), list[str]()
    async with answers.served() as answering:
        client = AgentClient(unix_socket(tmp_path / "agent.sock"), lines.append)
        async with contextlib.aclosing(client.watch()) as watch:  # type: ignore[type-var]
            await within(anext(watch))
            answering.say("a line")
            await until(lambda: lines == ["a line"])
        await client.disconnect()


async def test_one_who_reads_nothing_is_told_no_more_and_heard_no_further_until_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.runtime.answering.UNREAD_BYTES", 256 << 10)
    answers = Answers(tmp_path)
    async with answers.served() as answering:
        reader, writer = await asyncio.open_unix_connection(tmp_path / "agent.sock", limit=1)
        writer.write(line_of(Request(1, Watch())))
        await until(lambda: answers.asked)
        for _ in range(20_000):
            answering.say("a line of a hundred letters".ljust(100))
        (theirs,) = answering._connected
        assert 64 << 10 < theirs.transport.get_write_buffer_size() < 512 << 10
        for number in (2, 3, 4):
            writer.write(line_of(Request(number, Nodes())))
        await until(lambda: Nodes() in answers.asked)
        for _ in range(100):
            await asyncio.sleep(0)
        assert answers.asked.count(Nodes()) == 1
        while answers.asked.count(Nodes()) < 3:
            assert await within(reader.read(1 << 20))
        writer.close()


async def test_who_cannot_be_reached_is_tried_less_and_less_often() -> None:
    tried: list[float] = []

    async def nowhere() -> Any:
        tried.append(asyncio.get_running_loop().time())
        raise ConnectionRefusedError("nobody is there")

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(AgentClient(nowhere, print).nodes(), 1.0)
    assert 3 <= len(tried) <= 6 and tried[-1] - tried[-2] > tried[1] - tried[0]


async def test_who_says_what_is_no_answer_is_left_and_asked_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lives: list[asyncio.StreamWriter] = []

    async def babbles(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lives.append(writer)
        writer.write(b'{"type": "Nonsense"}\n')

    async with await asyncio.start_unix_server(babbles, tmp_path / "agent.sock"):
        client = AgentClient(unix_socket(tmp_path / "agent.sock"), print)
        asking = asyncio.create_task(client.nodes())
        await until(lambda: len(lives) >= 3)
        asking.cancel()
        await client.disconnect()
        for writer in lives:
            writer.close()
    assert "cannot say" in caplog.text
