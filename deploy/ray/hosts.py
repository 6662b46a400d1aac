"""The nodes of a Ray cluster as hosts of a deployment: which live, and the Node actor on each that has a node process.

To Ray's autoscaler a node with an actor is never idle: one on which nothing of the deployment has to run has none.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError

from deploy.cluster.hosts import Host
from deploy.options.config import DeployConfig
from deploy.ray.cluster import NAMESPACE, Actor, RayNode, hired, made, node_name, nodes_alive
from deploy.ray.leases import RESOURCES
from deploy.ray.node_actor import NodeActor
from epd_serve.errors import ConfigError, EpdError

LOOK_S = 1.0
START_S, ASK_S, END_S = 120.0, 5.0, 100.0
"""For an actor to start and to have its node process run, to answer, and to end its node process."""

logger = logging.getLogger(__name__)
T = TypeVar("T")


def kind_of(config: DeployConfig, there: Sequence[RayNode]) -> str:
    """Of the devices that a deployment takes there."""
    if config.engine == "sim":
        return "cpu"
    if config.device != "auto":
        return config.device
    return next((kind for kind in ("npu", "cuda") if any(RESOURCES[kind] in one.resources for one in there)), "cpu")


class RayHosts:
    """As `deploy.cluster.hosts.Hosts`.

    Args:
        kind: of the devices that they lend.
    """

    def __init__(self, config: DeployConfig, kind: str) -> None:
        self._config = config
        self._resource = RESOURCES[kind]
        self._alive: dict[str, RayNode] = {}
        self._actors: dict[str, Actor] = {}

    async def watch(self) -> AsyncIterator[tuple[Host, ...]]:
        told: tuple[Host, ...] | None = None
        while True:
            try:
                alive = await asyncio.to_thread(nodes_alive)
            except (RayError, RuntimeError) as error:  # its head is away
                logger.warning("Ray does not say which nodes there are: %s", error)
            else:
                self._alive = {one.id: one for one in alive}
                for gone in self._actors.keys() - self._alive.keys():
                    threading.Thread(target=ray.kill, args=(self._actors.pop(gone),), daemon=True).start()
                now = tuple(self._host(one) for one in alive)
                if now != told:
                    told = now
                    yield now
            await asyncio.sleep(LOOK_S)

    def _host(self, node: RayNode) -> Host:
        counts = (f"{count:g} {name}" for name, count in node.resources.items() if name in RESOURCES.values())
        devices = int(node.resources.get(self._resource, 0))
        return Host(node.id, node.address, devices, node.address, ", ".join(counts))

    async def find(self, id: str) -> str:
        if (actor := await asyncio.to_thread(found, self._config.name, id)) is None:
            return ""
        self._actors[id] = actor
        return await answered(actor.find.remote(), ASK_S, f"node {id}")

    async def reach(self, id: str, clients: str = "") -> str:
        if id not in self._actors:
            self._actors[id] = await made(self._hired, id)
        address, trouble = await answered(self._actors[id].reach.remote(clients), START_S, f"node {id}")
        if trouble:
            raise ConfigError(trouble)
        return str(address)

    async def leave(self, id: str) -> None:
        if (actor := self._actors.pop(id, None)) is not None:
            await end(actor, f"node {id}")

    async def parts(self) -> dict[str, int]:
        actors = dict(self._actors)
        asked = (answered(actor.pid.remote(), ASK_S, f"node {id}") for id, actor in actors.items())
        told = await asyncio.gather(*asked, return_exceptions=True)
        return {f"{id}/actor": pid for id, pid in zip(actors, told, strict=True) if isinstance(pid, int)}

    def _hired(self, id: str) -> Actor:
        """Its Node actor: the one there is, or another. Waits for the cluster's head: for a thread."""
        config, node = self._config, self._alive.get(id)
        if node is None:
            raise EpdError(f"node {id} has gone")
        name, api = f"{config.name}-{id}", (node.address, config.node_ports, config.node_secrets, config.run_root)
        return hired(NodeActor, node_name(config.name, id), id, name, *api, get_if_exists=True)


def found(deployment: str, node: str) -> Actor | None:
    """The Node actor that there is. Waits for the cluster's head: for a thread."""
    with contextlib.suppress(ValueError):  # no part of it
        return ray.get_actor(node_name(deployment, node), namespace=NAMESPACE)
    return None


async def end(actor: Actor, who: str) -> None:
    """Its node process, and it."""
    try:
        await answered(actor.end.remote(), END_S, who)
    except EpdError as error:
        logger.warning("%s", error)
    await asyncio.to_thread(ray.kill, actor)


async def end_all(deployment: str) -> None:
    """Every node process of the deployment, and the actors that have them."""
    ending = []
    for node in await asyncio.to_thread(nodes_alive):
        if (actor := await asyncio.to_thread(found, deployment, node.id)) is not None:
            ending.append(end(actor, f"node {node.address}"))
    await asyncio.gather(*ending)


async def answered(answer: Awaitable[Any], within_s: float, who: str) -> Any:
    """Raises EpdError: there is no answer."""
    try:
        async with asyncio.timeout(within_s):
            return await answer
    except TimeoutError:
        raise EpdError(f"{who} has not answered for {within_s:g} s") from None
    except RayError as error:
        raise EpdError(f"{who} does not answer: {error}") from error
