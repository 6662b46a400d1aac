"""A root with an agent that a test kills, seen through its socket."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from deploy.host.environment import module_environment
from deploy.runtime.protocol import Observed, Order, Phase
from tests.deploy.one_node import OneNode
from tests.waiting import PATIENCE_S, until

KEPT_AGENT = str(Path(__file__).with_name("kept_agent.py"))
Seen = dict[str, Observed]


class World:
    """What runs in `folder`, and what the test makes of it.

    Attributes:
        lines: for the operator, as far as somebody watches.
    """

    def __init__(self, folder: Path, runtime: OneNode, lines: list[str]) -> None:
        self.folder = folder
        self.run_path = Path((folder / "run_path").read_text())
        self.runtime = runtime
        self.lines = lines

    @property
    def agent(self) -> int:
        """Pid of its life of now."""
        return int((self.folder / "agent").read_text())

    def next_life(self, name: str, flags: str) -> None:
        """Flags of the next life of a stage that runs."""
        (self.folder / f"flags-{name}").write_text(flags)

    async def runs(self, name: str) -> None:
        """A life of it has taken these flags."""
        await until(lambda: not (self.folder / f"flags-{name}").exists(), f"{name} to take its flags")

    async def kill(self, *with_it: int) -> None:
        """The agent, and at the same time these processes."""
        last = self.agent
        os.kill(last, signal.SIGKILL)
        for pid in with_it:
            os.kill(pid, signal.SIGKILL)
        await until(lambda: self.agent != last)

    async def seen(self, when: Callable[[Seen], object] = lambda _: True) -> Seen:
        """What is told once it is so."""
        async with asyncio.timeout(PATIENCE_S), contextlib.aclosing(self.runtime.watch()) as watch:
            async for item in watch:
                if when(found := {one.order.id: one for one in item}):
                    return found
        raise AssertionError("a watch never ends")

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[list[Seen]]:
        """All that is told meanwhile; lines for the operator come, too."""
        told: list[Seen] = []

        async def listen() -> None:
            async for item in self.runtime.watch():
                told.append({one.order.id: one for one in item})

        listening = asyncio.create_task(listen())
        try:
            await until(lambda: told)
            yield told
        finally:
            listening.cancel()

    async def is_in(self, phase: Phase, *names: str) -> Seen:
        return await self.seen(lambda all_: all(name in all_ and all_[name].phase is phase for name in names))

    async def up(self, *some: Order) -> Seen:
        for order in some:
            await self.runtime.start(order)
        return await self.is_in(Phase.UP, *(order.id for order in some))


@contextlib.asynccontextmanager
async def world_below(folder: Path, *options: str) -> AsyncIterator[World]:
    """`options`: of the launch, `+NAME=VALUE`."""
    with (folder / "output").open("wb") as output:
        argv = (sys.executable, KEPT_AGENT, str(folder), *options)
        process = subprocess.Popen(argv, env=module_environment(), stdout=output, stderr=output, start_new_session=True)
    lines: list[str] = []
    try:
        await until(lambda: (folder / "agent").exists() or process.poll() is not None)
        assert process.poll() is None, (folder / "output").read_text()
        runtime = OneNode(Path((folder / "run_path").read_text()), lines.append)
        yield World(folder, runtime, lines)
        assert process.poll() is None, (folder / "output").read_text()
        async with asyncio.timeout(PATIENCE_S):
            await runtime.close()
        await runtime.disconnect()
    finally:
        process.terminate()
        code = process.wait(PATIENCE_S)
    assert code == 0 and "Traceback" not in (folder / "output").read_text(), (folder / "output").read_text()
