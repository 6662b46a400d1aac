"""One life of the controller of a deployment on several hosts, whoever places its nodes.

What a life of a controller is, `deploy/launch/life.py` says; here it gets nodes that come and go (`nodes.py`), devices
that somebody lends, and notes that the nodes keep (`notes.py`). Stages and front doors go on without it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING

import msgspec

from deploy.agent.waits import Patience
from deploy.cluster.hosts import Host
from deploy.cluster.leases import ClusterLeases
from deploy.cluster.nodes import INSTANCES, Cluster, Nodes
from deploy.cluster.notes import NodeNotes
from deploy.control.aim import Aim
from deploy.front.all_doors import AllDoors
from deploy.front.key_watch import Read
from deploy.host.event_loop import first, together
from deploy.launch.admin import open_admin, serve_page
from deploy.launch.life import API_KEYS, GRACE_S, READY, Deployment, Life, Process, noted_keys
from deploy.launch.ready_message import ready_message
from deploy.launch.screen import Shown
from deploy.memory.plan import memory_table
from deploy.plan.blueprint import draw
from epd_serve.errors import EpdError, StageError

if TYPE_CHECKING:
    from fastapi import APIRouter

LOG_TAIL_BYTES = 4096


class ClusterLife(Life):
    """On the nodes of a cluster. Made by `prepared`."""

    def __init__(
        self,
        cluster: Cluster,
        nodes: Nodes,
        leases: ClusterLeases,
        deployment: Deployment,
        doors: AllDoors,
        process: Process,
        screen: Shown,
        announced: Callable[[str], None],
    ) -> None:
        aim = Aim(deployment.blueprint, leases)
        super().__init__(deployment, nodes.many, doors, nodes.notes, process, screen, aim)
        self.nodes, self.leases = nodes, leases
        self._superseded = nodes.many.superseded, doors.superseded
        self._cluster = cluster
        self._announced = announced

    def introduce(self) -> None:
        memory = self.blueprint.memory
        if memory is not None and memory.shared_devices:
            self.screen.line(f"memory of the devices:\n{memory_table(memory)}")

    def key_file(self, path: str) -> Read:
        """On the host where the deployment was asked for."""
        return self.nodes.key_file(path)

    async def answer(self, routes: APIRouter) -> None:
        from fastapi import Response

        from proxy.http.admin import create_admin

        @routes.get("/logs/{node}/{name}", include_in_schema=False)
        async def log(node: str, name: str, offset: int = 0) -> Response:
            data, end = await self.nodes.log(node, name, offset)
            return Response(data, media_type="application/octet-stream", headers={"epd-end": str(end)})

        self._cluster.answers(create_admin(self.doors.table, self.doors.metrics, trusted=True, more=[routes]))
        config = self.blueprint.config
        with open_admin(config.admin_host, config.admin_port, config.admin_key_file) as admin:
            if admin is not None:
                await serve_page(admin, self.doors, config, grace_s=GRACE_S, more=[routes])
            await asyncio.get_running_loop().create_future()  # until cancelled

    async def announce(self) -> None:
        seconds = time.monotonic() - self._cluster.began
        told = ready_message(self.aim.drawn, self._cluster.logs, self.news.instances(), seconds, ends="")
        self._announced(told)

    async def explain(self, error: EpdError) -> str:
        """With the end of the log of the stage that is to blame: it goes with its node process."""
        if isinstance(error, StageError) and (one := self.news.seen.get(error.stage)) is not None:
            try:
                tail, _ = await self.nodes.log(one.order.spec.node, error.stage, -LOG_TAIL_BYTES)
            except EpdError as silent:
                return f"{error}; its log cannot be read: {silent}"
            return f"{error}; the end of its log:\n{tail.decode(errors='replace')}"
        return str(error)

    async def own_parts(self) -> dict[str, int]:
        return {"controller": os.getpid(), **await self.nodes.parts()}

    async def live(self, *others: Coroutine[None, None, None]) -> int:
        """Until the deployment is over: its exit code. Where it has never been ready its node processes end, too. When
        this is cancelled, what runs goes on.

        Args:
            others: go on meanwhile; what they raise ends this life.

        Raises:
            EpdError: there is another controller.
        """
        beside = together(self.nodes.follow(self.aim), self._remember(), self._rival(), *others)
        try:
            code = await first(self.run(), beside)
            assert code is not None, "what goes on beside it does not end"
            if not self.ready:
                await self.nodes.end()
            return code
        finally:
            await self.nodes.part()

    async def _remember(self) -> None:
        """What runs, for a life that begins while a node is silent."""
        async for instances in self.nodes.many.watch():
            self.notes.write(INSTANCES, msgspec.json.encode(instances))

    async def _rival(self) -> None:
        await first(*(one.wait() for one in self._superseded))
        raise EpdError("another controller has this deployment")


async def prepared(
    cluster: Cluster,
    notes: NodeNotes,
    there: tuple[Host, ...],
    process: Process,
    screen: Shown,
    announced: Callable[[str], None],
) -> ClusterLife:
    """The nodes as they are, the deployment drawn for them, and all of them told of it.

    Raises:
        ConfigError: it cannot be had there. EpdError: a node does not answer.
    """
    config = cluster.config
    nodes = Nodes(cluster, notes, screen.line)
    machines = await nodes.gather(there)
    if config.api_key_file and notes.read(API_KEYS) is None:
        notes.write(API_KEYS, (await nodes.key_file(config.api_key_file)()).encode())
    blueprint = await asyncio.to_thread(draw, config, machines=machines)
    keys = noted_keys(notes, config.api_key_file)
    deployment = Deployment(config.name, blueprint, Patience(), api_keys=keys)
    key = _key_file(nodes.key)
    doors = AllDoors(say=screen.line, key_file=key, goes_on=notes.read(READY) is not None)
    await nodes.open(deployment, doors)
    leases = ClusterLeases(cluster.kind, config.placement, notes, nodes, cluster.reserver)
    return ClusterLife(cluster, nodes, leases, deployment, doors, process, screen, announced)


def _key_file(key: str) -> str:
    """A file that this process alone can read, and that goes with it."""
    descriptor = os.memfd_create("key")
    os.fchmod(descriptor, 0o600)
    os.write(descriptor, key.encode())
    return f"/proc/self/fd/{descriptor}"
