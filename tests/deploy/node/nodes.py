"""Node processes of one small deployment on this machine, over TLS, and whoever runs it, in the test's own process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import NoneType

import httpx

from deploy.agent.specs import orders
from deploy.agent.waits import Patience
from deploy.front.all_doors import AllDoors
from deploy.front.remote import RemoteDoors
from deploy.host import processes
from deploy.host.environment import LAUNCH_ENV, module_environment
from deploy.host.ports import free_ports
from deploy.node.facts import NodeFacts
from deploy.node.process import Address, find_node
from deploy.node.setup import NodeInfo, NodeSetup, deployment_key
from deploy.options.config import DeployConfig
from deploy.plan.blueprint import draw
from deploy.runtime.many import ManyNodes
from deploy.runtime.node_client import NodeClient, NodeHttp, NodeTransport
from deploy.runtime.protocol import Observed, Order
from deploy.runtime.secrets import NodeSecrets
from epd_serve.errors import EpdError
from tests.deploy.node_secrets import node_secrets
from tests.waiting import PATIENCE_S, until

QUICK = Patience(poll_s=0.03, backoff_s=0.1, health_every_s=0.1, stop_grace_s=2.0)
NONCE = "once"


@dataclass(frozen=True)
class Run:
    """A node process. `path`: its run directory, once it has been told its deployment."""

    address: str
    pid: int
    path: Path

    @property
    def lives(self) -> bool:
        found = processes.stat(self.pid)
        return found is not None and not found.dead


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
    runs: dict[str, Run] = field(default_factory=dict)

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
        self.folder = self.root / "secrets"
        if not self.folder.exists():
            node_secrets(self.folder)
        self.secrets = NodeSecrets(str(self.folder), "--node-secrets")
        key = self.root / f"key-{self.owner.pid}"
        key.touch(mode=0o600)
        key.write_text(deployment_key(self.secrets.token, "test", NONCE))
        self.doors = AllDoors(say=self.lines.append, key_file=str(key), link_grace_s=5.0)

    def setup(self, node: str, *, front: bool, **more: object) -> NodeSetup:
        machines = self.blueprint.machines.nodes
        machine = replace(machines[0], id=node, inventory=replace(machines[0].inventory, ids=(0, 1)))
        config = self.blueprint.config
        return NodeSetup("test", node, config, machine, machines, NONCE, front=front, patience=QUICK, **more)

    def file(self, node: str) -> Path:
        """Where its process says where it is."""
        return self.root / f"{node}.json"

    def found(self, node: str) -> Address | None:
        """The process that lives."""
        return find_node(self.file(node))

    def begin(self, node: str) -> subprocess.Popen[bytes]:
        """A process of this name, which leaves it at that where there is one."""
        words = ["node", "--listen", "127.0.0.1:20000-24999", "--secrets", str(self.folder)]
        words += ["--run-root", str(self.root), "--address-file", str(self.file(node)), "--owner", str(self.owner.pid)]
        log = (self.root / f"{node}.out").open("ab")
        return subprocess.Popen(
            [sys.executable, "-m", "deploy.cli", *words], env=module_environment(), stdout=log, stderr=log
        )

    async def there(self, node: str) -> Address:
        """Where its process is."""
        beginning = self.begin(node)
        found: Address = await until(lambda: self.found(node), f"node {node} to listen")
        beginning.wait(PATIENCE_S)
        return found

    def http(self, node: str, path: str = "/node") -> NodeHttp:
        return NodeHttp(path, self.transport(node), self.epoch)

    def transport(self, node: str) -> NodeTransport:
        async def reach() -> str:
            if (found := self.found(node)) is None:
                raise EpdError("it does not run")
            return found.address

        async def set_up() -> None:
            raise EpdError("it has begun again")

        return NodeTransport(self.secrets, reach, set_up)

    async def start(self, node: str, *, front: bool = False, **more: object) -> Run:
        """Its process, or the one that there is, told its deployment."""
        found = await self.there(node)
        http = self.http(node)
        try:
            async with asyncio.timeout(PATIENCE_S):
                await http.call("facts", NodeFacts, self.blueprint.config, node, 2)
                await http.call("setup", NoneType, self.setup(node, front=front, **more))

                async def told() -> bool:
                    return (await http.get(NodeInfo)).node == node

                await until(told)
        finally:
            await http.close()
        (path,) = (
            one.parent for one in self.root.glob("*/launcher.json") if json.loads(one.read_text())["pid"] == found.pid
        )
        self.runs[node] = run = Run(found.address, found.pid, path)
        return run

    def join(self, node: str, *, front: bool = False) -> None:
        self.nodes.join(node, NodeClient(self.transport(node), self.epoch))
        if front:
            self.doors.join(node, RemoteDoors(self.transport(node), self.epoch))

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

    async def answers(self, tokens: int = 3) -> int:
        """The status of one request, 0 where its connection broke."""
        body = {"model": "epd-demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens}
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
            if (found := self.found(node)) is not None:
                os.kill(found.pid, signal.SIGINT)
        await until(lambda: not self.processes(), "all of it to end")


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
