"""Hosts of a deployment that are processes of this machine: `epd-serve node`, started as whoever places them does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from deploy.cluster.hosts import Host
from deploy.host import processes
from deploy.host.environment import module_environment
from deploy.node.process import Address, find_node
from epd_serve.errors import EpdError
from tests.waiting import PATIENCE_S, until


class LocalHosts:
    """A `deploy.cluster.hosts.Hosts`.

    Args:
        folder: run root of all of them. secrets: that makes them members.

    Attributes:
        there: those that live, by id.
        owner: with whose end all node processes end.
    """

    def __init__(self, folder: Path, secrets: Path, *hosts: str, devices: int = 4) -> None:
        self._folder = folder
        self._secrets = secrets
        self._devices = devices
        self._changed = asyncio.Event()
        self.there: dict[str, Host] = {}
        self.owner = subprocess.Popen(["/bin/sleep", "3600"])
        for one in hosts:
            self.comes(one)

    def comes(self, id: str) -> None:
        self.there[id] = Host(id, f"host {id}", self._devices, "127.0.0.1", f"{self._devices} CPU")
        self._changed.set()

    async def dies(self, id: str) -> None:
        """With all of its processes."""
        del self.there[id]
        await self.kill(id)
        self._changed.set()

    async def kill(self, id: str) -> None:
        """Its node process, and so all below it."""
        found = self.found(id)
        assert found is not None, f"{id} has a node process"
        os.kill(found.pid, signal.SIGKILL)
        await until(lambda: self.found(id) is None, "its end")

    def found(self, id: str) -> Address | None:
        return find_node(self._folder / f"{id}.json")

    def pids(self) -> list[int]:
        """Of the node processes, and of all below them."""
        roots = [found.pid for found in map(self.found, ("a", "b", "c")) if found is not None]
        below = {one.pid: one.parent for one in processes.running()}
        every = list(roots)
        for pid in every:
            every += [child for child, parent in below.items() if parent == pid]
        return every

    async def end(self) -> None:
        before = self.pids()
        self.owner.kill()
        self.owner.wait()

        def left() -> list[int]:
            return [pid for pid in before if (found := processes.stat(pid)) is not None and not found.dead]

        await until(lambda: not left(), "all of it to end")

    # --- Hosts ----------------------------------------------------------------------------------------------------

    async def watch(self) -> AsyncIterator[tuple[Host, ...]]:
        told: tuple[Host, ...] | None = None
        while True:
            now = tuple(self.there.values())
            if now != told:
                told = now
                yield now
            self._changed.clear()
            with contextlib.suppress(TimeoutError):  # there may be other watchers
                async with asyncio.timeout(0.05):
                    await self._changed.wait()

    async def find(self, id: str) -> str:
        return found.address if (found := self.found(id)) is not None else ""

    async def reach(self, id: str, clients: str = "") -> str:
        if id not in self.there:
            raise EpdError(f"{id} has gone")
        if self.found(id) is None:
            words = ["node", "--listen", "127.0.0.1:20000-24999", "--secrets", str(self._secrets)]
            words += ["--run-root", str(self._folder), "--owner", str(self.owner.pid)]
            words += ["--address-file", str(self._folder / f"{id}.json")]
            with (self._folder / f"{id}.out").open("ab") as log:
                argv = [sys.executable, "-m", "deploy.cli", *words]
                begun = subprocess.Popen(argv, env=module_environment(), stdout=log, stderr=log)
            await until(lambda: self.found(id), f"{id} to listen")
            await asyncio.to_thread(begun.wait, PATIENCE_S)  # of several at once it may be another one that listens
        return await self.find(id)

    async def leave(self, id: str) -> None:
        if (found := self.found(id)) is not None:
            os.kill(found.pid, signal.SIGINT)
            await until(lambda: self.found(id) is None, "its end")

    async def parts(self) -> dict[str, int]:
        return {}
