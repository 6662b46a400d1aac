"""A node's HTTP API, both ends: lives of the node, several controllers, what takes long, what fails."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import httpx
import pytest

from deploy.agent.specs import orders
from deploy.host.state import SharedState, StateFiles
from deploy.node import routes
from deploy.node.routes import NodeWatch, serve_node
from deploy.options.config import DeployConfig
from deploy.plan.blueprint import draw
from deploy.runtime.node_api import FrontStatus, NodeStatus, Seen, SupersededError
from deploy.runtime.node_client import NodeCallError, NodeClient
from deploy.runtime.protocol import Order
from epd_serve.errors import ConfigError
from epd_serve.peers import Peer
from epd_serve.roles import Role
from tests.deploy.fake_node import FakeNode
from tests.deploy.node_socket import NODE_SOCKET, on_socket, unix_transport
from tests.waiting import PATIENCE_S, until

E, P, _ = orders(draw(DeployConfig(layout="(E-P)-D", device="cpu", arena_mib=8, kv_staging_mib=4)))


@dataclass
class World:
    """A node in `folder`, with an agent in memory that each of its lives finds again."""

    folder: Path
    listening: socket.socket
    agent: FakeNode = field(default_factory=lambda: FakeNode("local"))
    state: StateFiles = field(default_factory=StateFiles.make)
    watch: NodeWatch = field(default_factory=NodeWatch)
    serving: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Another life of it."""
        self.watch = NodeWatch()
        serving = serve_node(on_socket(self.listening.dup()), SharedState(self.state), self.watch, self.agent, None)  # type: ignore[arg-type]
        self.serving = asyncio.create_task(serving)

    async def end(self) -> None:
        if self.serving is not None:
            self.serving.cancel()
            await asyncio.wait([self.serving])

    def client(self, epoch: int = 0) -> NodeClient:
        return NodeClient(unix_transport(self.folder / NODE_SOCKET), epoch)


@contextlib.asynccontextmanager
async def world_in(folder: Path, *, begins: bool = True) -> AsyncIterator[World]:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / NODE_SOCKET))
        listening.listen()
        world = World(folder, listening)
        if begins:
            world.begin()
        try:
            yield world
        finally:
            await world.end()
            await world.agent.runtime.__aexit__()


async def within(what: Any) -> Any:
    return await asyncio.wait_for(what, PATIENCE_S)


async def newer(client: NodeClient, number: int = 0) -> Seen[NodeStatus]:
    async with asyncio.timeout(PATIENCE_S):
        while (seen := await client.status(number)) is None:
            pass
    return seen


async def watched(client: NodeClient) -> None:
    """Until it is refused."""
    number = 0
    while True:
        number = (await newer(client, number)).number


async def test_whoever_decided_before_is_told_that_it_is_over(tmp_path: Path) -> None:
    async with world_in(tmp_path) as world:
        first, second = world.client(1), world.client(2)
        await within(first.start(P))
        lasts = asyncio.create_task(watched(first))
        await within(second.groups())
        with pytest.raises(SupersededError):
            await within(lasts)
        with pytest.raises(SupersededError):
            await within(first.stop("P0", 1.0))
        assert world.agent.running() == {"P0"}, "what the first one asked was not done"
        await within(second.stop("P0", 0.0))


async def test_who_comes_late_with_an_earlier_epoch_is_refused_by_the_next_life_too(tmp_path: Path) -> None:
    async with world_in(tmp_path) as world:
        await within(world.client(7).groups())
        await world.end()
        world.begin()
        for epoch in (0, 6):
            with pytest.raises(SupersededError):
                await within(world.client(epoch).groups())
        await within(world.client(7).groups())


async def test_a_watch_goes_on_with_the_next_life_and_that_is_told_who_is_there_elsewhere(tmp_path: Path) -> None:
    async with world_in(tmp_path) as world:
        client, peers = world.client(), (Peer("D0", Role.D),)
        await within(client.know(peers))
        number = 0
        for _ in range(3):
            seen = await newer(client, number)
            assert seen.value.instances == () and seen.number > number
            assert world.agent.known == peers
            number = seen.number
            await world.end()
            world.agent.begin_again()
            world.begin()
        await within(client.start(P))
        while not (seen := await newer(client, number)).value.instances:
            number = seen.number


async def test_of_several_changes_the_last_one_is_seen(tmp_path: Path) -> None:
    async with world_in(tmp_path) as world:
        client = world.client()
        seen = await newer(client)
        assert seen.value.instances == ()
        for number in range(20):
            await client.start(replace(P, id=f"P{number}"))
        while len(seen.value.instances) < 20:
            seen = await newer(client, seen.number)


async def test_lines_reach_who_watches_once_each_through_lives_of_the_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heard: list[str] = []

    async def hear(number: int) -> None:
        while True:
            seen = await newer(client, number)
            number = seen.number
            heard.extend(seen.value.lines)

    async with world_in(tmp_path) as world:
        client = world.client()
        world.watch.say("nobody watches")
        first = await newer(client)
        assert first.value.lines == ()
        hearing = asyncio.create_task(hear(first.number))
        for number in range(3):
            world.watch.say(f"line {number}")
        await until(lambda: heard == ["line 0", "line 1", "line 2"])
        await world.end()
        world.begin()
        world.watch.say("of the next life")
        world.watch.say("and another one")
        await until(lambda: heard[3:] == ["of the next life", "and another one"])
        hearing.cancel()
    assert "nobody watches" in capsys.readouterr().err, "the log of the node has all of them"


async def test_of_lines_that_nobody_has_taken_the_newest_are_kept(tmp_path: Path) -> None:
    async with world_in(tmp_path) as world:
        client = world.client()
        first = await newer(client)
        for number in range(2 * routes.LINES):
            world.watch.say(str(number))
        seen = await newer(client, first.number)
        assert seen.value.lines == tuple(str(number) for number in range(routes.LINES, 2 * routes.LINES))
        world.watch.say("one more")
        assert (await newer(client, seen.number)).value.lines == ("one more",)


async def test_a_watch_is_answered_without_news_too(tmp_path: Path) -> None:
    async with world_in(tmp_path) as world:
        client = world.client()
        assert await within(client.status((await newer(client)).number)) is None


async def test_what_is_refused_and_what_fails_is_told_and_costs_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world_in(tmp_path) as world:
        client = world.client()

        async def refuses(order: Order) -> None:
            raise ConfigError("no such device", param="--device")

        async def fails(order: Order) -> None:
            raise KeyError("oops")

        with monkeypatch.context() as patch:
            patch.setattr(world.agent, "start", refuses)
            with pytest.raises(ConfigError, match="no such device") as caught:
                await within(client.start(E))
            assert caught.value.param == "--device"
            patch.setattr(world.agent, "start", fails)
            with pytest.raises(NodeCallError, match="KeyError: 'oops'"):
                await within(client.start(E))
        assert [node.id for node in (await newer(client)).value.nodes] == ["local"]


async def test_a_defect_in_looking_after_front_doors_is_not_kept_quiet(tmp_path: Path) -> None:
    """It ends this life of control, and the next one looks after them."""
    front = Mock(serve=AsyncMock(side_effect=KeyError("a defect")), status=FrontStatus)
    async with world_in(tmp_path, begins=False) as world:
        agent: Any = world.agent
        with pytest.raises(ExceptionGroup) as caught:
            await within(
                serve_node(on_socket(world.listening.dup()), SharedState(world.state), NodeWatch(), agent, front)
            )
        assert caught.group_contains(KeyError)


async def test_what_takes_longer_than_a_request_waits_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "WAIT_S", 0.05)
    asked, done = list[str](), asyncio.Event()
    async with world_in(tmp_path) as world:

        async def stop(id: str, grace_s: float) -> None:
            asked.append(f"{id} within {grace_s:g} s")
            await done.wait()

        monkeypatch.setattr(world.agent, "stop", stop)
        stopping = asyncio.create_task(world.client().stop("P0", 2.5))
        await until(lambda: len(asked) == 3)
        assert not stopping.done() and set(asked) == {"P0 within 2.5 s"}
        done.set()
        await within(stopping)


async def _a_call_waits_for_a_node(folder: Path) -> None:
    async with world_in(folder, begins=False) as world:
        client = world.client()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.groups(), 0.1)
        asked = asyncio.create_task(client.start(P))
        await asyncio.sleep(0.05)
        world.begin()
        await within(asked)
        assert world.agent.running() == {"P0"}
        await client.disconnect()


def _on_uvloop(main: Coroutine[Any, Any, None]) -> None:
    uvloop = pytest.importorskip("uvloop")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)


@pytest.mark.parametrize("run", [asyncio.run, _on_uvloop])
def test_a_call_waits_for_a_node_and_the_caller_says_for_how_long(
    tmp_path: Path, run: Callable[[Coroutine[Any, Any, None]], None]
) -> None:
    run(_a_call_waits_for_a_node(tmp_path))


async def test_who_cannot_be_reached_is_tried_less_and_less_often() -> None:
    tried: list[float] = []

    def nowhere(request: httpx.Request) -> httpx.Response:
        tried.append(asyncio.get_running_loop().time())
        raise httpx.ConnectError("nobody is there")

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(NodeClient(httpx.MockTransport(nowhere)).groups(), 1.0)
    assert 3 <= len(tried) <= 6 and tried[-1] - tried[-2] > tried[1] - tried[0]


async def test_who_says_what_is_no_answer_is_asked_again_and_what_cannot_be_one_is_an_error() -> None:
    ending = httpx.Response(500, text="Internal Server Error")
    answers = iter([ending, httpx.Response(200, json={}), ending, httpx.Response(200, json=["nonsense"])])
    client = NodeClient(httpx.MockTransport(lambda request: next(answers)))
    assert await within(client.groups()) == {}
    with pytest.raises(NodeCallError, match="cannot answer"):
        await within(client.groups())
