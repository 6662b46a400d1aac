"""HTTP to a node by way of its Node actor, without Ray: what is asked of the actor is answered in this process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deploy.host.rundir import HELD, hold
from deploy.host.state import SharedState, StateFiles
from deploy.node.routes import NodeWatch, serve_node
from deploy.node.start import NodeRun
from deploy.ray import node_actor
from deploy.ray.node_actor import NodeActor
from deploy.ray.nodes import ThroughActor
from deploy.runtime.node_api import NODE_SOCKET
from deploy.runtime.node_client import NodeClient
from deploy.runtime.protocol import Order, Spec
from epd_serve.errors import ConfigError, EpdError
from epd_serve.roles import Role
from tests.deploy.fake_node import FakeNode
from tests.deploy.node.nodes import deployment
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.asyncio
ORDER = Order("P0", Spec(Role.P, (0,), "d", node="n"))


@dataclass
class World:
    folder: Path
    agent: FakeNode
    client: NodeClient
    failures: int = 0

    @contextlib.asynccontextmanager
    async def node(self, name: str) -> AsyncIterator[None]:
        """A life of the node process, with a run directory of its own."""
        run = self.folder / name
        run.mkdir()
        held = hold(run / HELD)
        NodeRun("deployment", "n", run, os.getpid(), ready=True).write()
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(run / NODE_SOCKET))
            listening.listen()
            agent: Any = self.agent
            state = SharedState(StateFiles.make())
            serving = asyncio.create_task(serve_node(listening.dup(), state, NodeWatch(), agent, None))
            try:
                yield
            finally:
                serving.cancel()
                await asyncio.wait([serving])
                held.close()


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(node_actor, "here", lambda: "n")
    actor = NodeActor("deployment", str(tmp_path))

    async def ask(*request: Any) -> Any:
        if one.failures:
            one.failures -= 1
            raise EpdError("the actor is about to be started again")
        return await actor.ask(*request)

    one = World(tmp_path, FakeNode("n"), NodeClient(ThroughActor(ask), 1))
    yield one
    await one.agent.runtime.__aexit__()


async def test_calls_and_watches_go_through_and_so_does_what_is_refused(world: World) -> None:
    async with world.node("first"), asyncio.timeout(PATIENCE_S):
        await world.client.start(ORDER)
        seen = await world.client.status()
        assert seen is not None and [one.order for one in seen.value.instances] == [ORDER]
        with pytest.raises(ConfigError):
            await world.client.start(Order("P0", Spec(Role.P, (1,), "another", node="n")))


async def test_what_is_asked_while_nobody_answers_is_done_by_whoever_comes(world: World) -> None:
    starting = asyncio.create_task(world.client.start(ORDER))
    await asyncio.sleep(0.1)
    assert not starting.done()
    async with world.node("first"), asyncio.timeout(PATIENCE_S):
        await starting
    stopping = asyncio.create_task(world.client.stop("P0", 0.0))
    async with world.node("another"), asyncio.timeout(PATIENCE_S):
        await stopping
        await until(lambda: not world.agent.running())


async def test_an_actor_that_fails_is_asked_again(world: World) -> None:
    world.failures = 3
    async with world.node("first"), asyncio.timeout(PATIENCE_S):
        await world.client.start(ORDER)
    assert world.failures == 0 and world.agent.running() == {"P0"}


async def test_a_client_who_comes_between_two_node_processes_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with deployment(tmp_path) as one:

        @contextlib.contextmanager
        def owner() -> Iterator[tuple[int, int]]:
            descriptor = os.pidfd_open(one.owner.pid)
            yield one.owner.pid, descriptor
            os.close(descriptor)

        monkeypatch.setattr(node_actor, "here", lambda: "a")
        monkeypatch.setattr(node_actor, "_raylet", owner)
        actor = NodeActor("test", str(tmp_path))
        one.runs["a"] = first = await actor.ensure(one.setup("a", front=True))
        os.kill(first.pid, signal.SIGKILL)
        await until(lambda: not one.processes(), "all of it to end")
        answer, question = await asyncio.open_connection("127.0.0.1", one.port)
        question.write(b"GET /v1/models HTTP/1.1\r\nhost: here\r\n\r\n")
        one.runs["a"] = await actor.ensure(one.setup("a", front=True))
        one.join("a", front=True)
        async with one.controlled(one.orders("a")):
            assert await answer.readline() == b"HTTP/1.1 200 OK\r\n"
        question.close()
        await actor.end()
        assert await one.answers() == 0, "nobody is there any more"
