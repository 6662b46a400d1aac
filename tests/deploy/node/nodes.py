"""Node processes of one small deployment on this machine, and whoever runs it, in the test's own process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx

from deploy.agent.specs import orders
from deploy.agent.waits import Patience
from deploy.front.all_doors import AllDoors
from deploy.front.remote import RemoteDoors
from deploy.host import processes
from deploy.host.environment import LAUNCH_ENV
from deploy.host.ports import free_ports
from deploy.node.start import NodeRun, NodeSetup, end_node, find_node, start_node
from deploy.options.config import DeployConfig
from deploy.plan.blueprint import draw
from deploy.plan.proxy_settings import build_proxy_settings
from deploy.runtime.many import ManyNodes
from deploy.runtime.node_api import NODE_SOCKET
from deploy.runtime.node_client import NodeClient, unix_transport
from deploy.runtime.protocol import Observed, Order
from tests.waiting import PATIENCE_S, until

QUICK = Patience(poll_s=0.03, backoff_s=0.1, health_every_s=0.1, stop_grace_s=2.0)
KEY = secrets.token_hex(32)


@dataclass
class Deployment:
    """Whoever runs it: knows what is wanted, and tells the front doors what there is.

    Attributes:
        owner: a process with whose end everything ends.
        orders: by node.
    """

    root: Path
    owner: subprocess.Popen[bytes]
    layout: str
    epoch: int = 1
    lines: list[str] = field(default_factory=list)
    runs: dict[str, NodeRun] = field(default_factory=dict)

    def __post_init__(self) -> None:
        (self.port,) = free_ports(1)
        profile = self.root / "profile.json"
        profile.write_text(json.dumps({"decode_step_s": [[1, 0.001]]}))
        self.blueprint = draw(
            DeployConfig(
                layout=self.layout,
                engine="sim",
                sim_profile=str(profile),
                arena_mib=32,
                kv_staging_mib=4,
                run_root=str(self.root),
                stage_template="never",
                port=self.port,
                drain_s=5.0,
            )
        )
        self.nodes = ManyNodes(self.lines.append, silent_s=3.0)
        key = self.root / f"key-{self.owner.pid}"
        key.touch(mode=0o600)
        key.write_text(KEY)
        self.doors = AllDoors(say=self.lines.append, key_file=str(key), link_grace_s=5.0)

    def setup(self, node: str, *, front: bool) -> NodeSetup:
        return NodeSetup(
            deployment="test",
            node=node,
            host="127.0.0.1",
            key=KEY,
            blueprint=self.blueprint,
            front=build_proxy_settings(self.blueprint) if front else None,
            owner_pid=self.owner.pid,
            run_root=str(self.root),
            patience=QUICK,
        )

    async def start(self, node: str, *, front: bool = False) -> NodeRun:
        """Its process, or the one that there is."""
        owner = os.pidfd_open(self.owner.pid)
        try:
            run = await asyncio.to_thread(start_node, self.setup(node, front=front), owner=owner)
        finally:
            os.close(owner)
        self.runs[node] = run
        return run

    def join(self, node: str, *, front: bool = False) -> None:
        path = self.runs[node].path / NODE_SOCKET
        self.nodes.join(node, NodeClient(unix_transport(path), self.epoch))
        if front:
            self.doors.join(node, RemoteDoors(unix_transport(path), self.epoch))

    def orders(self, *nodes: str) -> list[Order]:
        """Its instances, on these nodes in turn."""
        return [
            Order(one.id, replace(one.spec, node=nodes[number % len(nodes)]))
            for number, one in enumerate(orders(self.blueprint))
        ]

    async def keep(self, wanted: list[Order]) -> None:
        """What is wanted runs, until cancelled, and the front doors know what there is."""
        async for instances in self.nodes.watch():
            self.doors.publish(instances, {order.spec.role for order in wanted})
            there = {one.order.id for one in instances}
            for order in wanted:
                if order.id not in there:
                    await self.nodes.start(order)

    @contextlib.asynccontextmanager
    async def controlled(self, wanted: list[Order]) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self.doors.serve()), asyncio.create_task(self.keep(wanted))]
        try:
            await self.up(*wanted)
            async with asyncio.timeout(PATIENCE_S):
                await self.doors.ready()
            yield
            assert not any(task.done() for task in tasks), [task for task in tasks if task.done()]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def seen(self) -> dict[str, Observed]:
        async with asyncio.timeout(PATIENCE_S), contextlib.aclosing(self.nodes.watch()) as watch:  # type: ignore[type-var]
            return {one.order.id: one for one in await anext(watch)}

    async def up(self, *some: Order) -> dict[str, Observed]:
        async def are_up() -> dict[str, Observed]:
            found = await self.seen()
            return found if all(order.id in found and found[order.id].serves for order in some) else {}

        await until(are_up, "all up")
        return await self.seen()

    async def answers(self) -> int:
        """The status of one request, 0 where its connection broke."""
        body = {"model": "epd-demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        with contextlib.suppress(httpx.TransportError):
            async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S) as client:
                url = f"http://127.0.0.1:{self.port}/v1/chat/completions"
                return (await client.post(url, json=body)).status_code
        return 0

    def processes(self) -> list[int]:
        """Of all its runs: what carries their marks, and the node processes."""
        ids = [run.path.name for run in self.runs.values()]
        marked = [one.pid for one in processes.running() if any(_is_of(one.pid, id) for id in ids)]
        alive = [run.pid for run in self.runs.values() if (found := processes.stat(run.pid)) and not found.dead]
        return [*marked, *alive]

    def left(self) -> list[Path]:
        """What is left of it in memory and below the run root."""
        ids = [run.path.name for run in self.runs.values()]
        return [path for id in ids for path in (*Path("/dev/shm").glob(f"*epd-{id}*"), *self.root.glob(id))]

    async def end(self) -> None:
        await self.nodes.disconnect()
        for node in self.runs:
            if (run := find_node("test", node, self.root)) is not None:
                await asyncio.to_thread(end_node, run)


def _is_of(pid: int, launch: str) -> bool:
    return processes.has_environment(pid, LAUNCH_ENV, launch)


@contextlib.asynccontextmanager
async def deployment(root: Path, layout: str = "E-P-D") -> AsyncIterator[Deployment]:
    """With an owner that lives. In the end nothing of it is left."""
    owner = subprocess.Popen(["/bin/sleep", "3600"])
    one = Deployment(root, owner, layout)
    try:
        yield one
        await one.end()
        await until(lambda: not one.processes(), "no process")
        assert not one.left()
    finally:
        owner.kill()
        owner.wait()
        await until(lambda: not one.processes(), "no process")
