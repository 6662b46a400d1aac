"""An agent over its socket, beyond what every runtime does: connections that end, lines, failures."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from deploy.agent.agent import Agent
from deploy.agent.process import served_agent
from deploy.agent.setup import AgentSetup
from deploy.agent.specs import orders
from deploy.host.ports import private_socket
from deploy.host.rundir import RunDir
from deploy.options.config import DeployConfig
from deploy.plan.blueprint import draw
from deploy.runtime.client import AgentClient, AgentError
from deploy.runtime.messages import AGENT_SOCKET
from deploy.runtime.protocol import Order
from deploy.runtime.stream import unix_socket
from tests.deploy.rooted_here import root_here
from tests.waiting import PATIENCE_S, until

LAYOUT = draw(DeployConfig(layout="PD", device="cpu", arena_mib=8, kv_staging_mib=4))


@contextlib.asynccontextmanager
async def served(folder: Path) -> AsyncIterator[Callable[[], asyncio.Task[None]]]:
    """Begins an agent on the same socket, any number of times one after the other."""
    serving = list[asyncio.Task[None]]()
    with contextlib.ExitStack() as stack:
        root = stack.enter_context(root_here())
        run = RunDir.create(folder / "run")
        stack.callback(run.remove)
        listening = stack.enter_context(private_socket(folder / AGENT_SOCKET))
        listening.listen()
        setup = AgentSetup.of(run, LAYOUT)

        async def serve() -> None:
            async with served_agent(setup, root.children, root.state(), listening.dup()):
                await asyncio.Event().wait()

        def begin() -> asyncio.Task[None]:
            serving.append(asyncio.create_task(serve()))
            return serving[-1]

        try:
            yield begin
        finally:
            for task in serving:
                task.cancel()
            await asyncio.wait(serving)


async def ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


async def test_lines_go_to_those_who_watch_once_each_and_else_to_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    says: list[Callable[[str], None]] = []
    made = Agent.__init__

    def hears(self: Agent, *args: Any, say: Callable[[str], None], **options: Any) -> None:
        says.append(say)
        made(self, *args, say=say, **options)

    monkeypatch.setattr(Agent, "__init__", hears)
    async with served(tmp_path) as begin:
        begin()
        lines: list[str] = []
        runtime = AgentClient(unix_socket(tmp_path / AGENT_SOCKET), lines.append)
        await runtime.nodes()
        says[0]("nobody watches")
        async with contextlib.aclosing(runtime.watch()) as one, contextlib.aclosing(runtime.watch()) as other:
            await anext(one)
            await anext(other)
            says[0]("somebody watches")
            await until(lambda: lines)
        await runtime.nodes()
        says[0]("nobody watches any more")
        await runtime.disconnect()
    assert lines == ["somebody watches"]
    assert capsys.readouterr().err.splitlines() == ["nobody watches", "nobody watches any more"]


async def test_a_failure_of_the_agents_is_told_and_costs_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(self: Agent, order: Order) -> None:
        raise KeyError("oops")

    monkeypatch.setattr(Agent, "start", fails)
    async with served(tmp_path) as begin:
        begin()
        runtime = AgentClient(unix_socket(tmp_path / AGENT_SOCKET), print)
        with pytest.raises(AgentError, match="KeyError: 'oops'"):
            await runtime.start(orders(LAYOUT)[0])
        assert (await runtime.nodes())[0].id == "local"
        await runtime.disconnect()


async def test_a_call_waits_for_an_agent_and_the_caller_says_for_how_long(tmp_path: Path) -> None:
    async with served(tmp_path) as begin:
        runtime = AgentClient(unix_socket(tmp_path / AGENT_SOCKET), print)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(runtime.nodes(), 0.1)
        asked = asyncio.create_task(runtime.nodes())
        await asyncio.sleep(0)
        begin()
        assert (await asyncio.wait_for(asked, PATIENCE_S))[0].id == "local"
        await runtime.disconnect()


async def _a_watch_outlives_agents(folder: Path) -> None:
    async with served(folder) as begin:
        runtime = AgentClient(unix_socket(folder / AGENT_SOCKET), print)
        async with contextlib.aclosing(runtime.watch()) as watch:
            for _ in range(3):
                agent = begin()
                assert await asyncio.wait_for(anext(watch), PATIENCE_S) == ()
                await ended(agent)
            await asyncio.sleep(0.05)  # it has heard of the end
        begin()
        assert (await asyncio.wait_for(runtime.nodes(), PATIENCE_S))[0].id == "local"
        await runtime.disconnect()


def _on_uvloop(main: Coroutine[Any, Any, None]) -> None:
    uvloop = pytest.importorskip("uvloop")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)


@pytest.mark.parametrize("run", [asyncio.run, _on_uvloop])
def test_a_watch_goes_on_with_the_next_agent(tmp_path: Path, run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    run(_a_watch_outlives_agents(tmp_path))
