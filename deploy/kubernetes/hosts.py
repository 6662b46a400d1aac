"""The node pods of a deployment as its hosts: which there are, by a watch of the API server.

Pods alone say all that is wanted. EndpointSlices are made from them, later, and tell which pods are Ready; a node is
that only when the controller has set it up, and whether its process answers is asked of itself.

    labels      app.kubernetes.io/instance: the deployment's name; app.kubernetes.io/component: node
    annotations epd-serve/devices: how many it lends
                epd-serve/nodes: FIRST-LAST, how many such pods the controller may have (`scale.py`)
    port        `node`, of the first container: where the node process is asked (default: 9443)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec

from deploy.cluster.hosts import Host
from deploy.kubernetes.api import ApiServer, Metadata
from deploy.options.config import DeployConfig
from epd_serve.errors import EpdError
from store.addresses import authority

DEVICES, RANGE = "epd-serve/devices", "epd-serve/nodes"
PORT_NAME, PORT = "node", 9443
START_S = 120.0
"""For a container to begin again."""


class _Port(msgspec.Struct, frozen=True, rename="camel"):
    container_port: int
    name: str = ""


class _Resources(msgspec.Struct, frozen=True):
    limits: dict[str, str] = {}


class _Container(msgspec.Struct, frozen=True):
    name: str
    ports: tuple[_Port, ...] = ()
    resources: _Resources = _Resources()


class _Spec(msgspec.Struct, frozen=True):
    containers: tuple[_Container, ...]


class _Running(msgspec.Struct, frozen=True):
    pass


class _States(msgspec.Struct, frozen=True):
    running: _Running | None = None


class _ContainerStatus(msgspec.Struct, frozen=True):
    name: str
    state: _States = _States()


class _Status(msgspec.Struct, frozen=True, rename="camel"):
    phase: str = ""
    pod_ip: str = msgspec.field(default="", name="podIP")
    container_statuses: tuple[_ContainerStatus, ...] = ()


class Pod(msgspec.Struct, frozen=True):
    """What we read of a pod."""

    metadata: Metadata
    spec: _Spec
    status: _Status = _Status()

    @property
    def id(self) -> str:
        """As long as its devices are the same. The next pod of a StatefulSet has the same name."""
        return f"{self.metadata.name}.{self.metadata.uid[:8]}"

    @property
    def is_host(self) -> bool:
        """It has begun, and has not come to its end; its node process may be between two lives."""
        return self.status.phase == "Running" and bool(self.status.pod_ip)

    @property
    def runs(self) -> bool:
        """Its node process does."""
        name = self.spec.containers[0].name
        return self.is_host and any(
            one.name == name and one.state.running is not None for one in self.status.container_statuses
        )

    @property
    def address(self) -> str:
        ports = self.spec.containers[0].ports
        port = next((one.container_port for one in ports if one.name == PORT_NAME), PORT)
        return authority(self.status.pod_ip, port)

    @property
    def resource(self) -> str:
        """What its devices are to Kubernetes: the extended resource among its limits, or else CPUs."""
        return next((name for name in self.spec.containers[0].resources.limits if "/" in name), "cpu")

    def host(self) -> Host:
        told = self.metadata.annotations.get(DEVICES, "0")
        devices = int(told) if told.isdecimal() else 0
        about = f"{devices} {self.resource}, by its annotation {DEVICES}"
        leaving = self.metadata.deletion_timestamp is not None
        return Host(self.id, self.metadata.name, devices, self.status.pod_ip, about, leaving)


class KubernetesHosts:
    """As `deploy.cluster.hosts.Hosts`, while `run` does.

    Attributes:
        pods: that there are, those that have not begun, too; None before they are known.
        path: of their kind, in their namespace.
    """

    def __init__(self, api: ApiServer, deployment: str) -> None:
        self.pods: tuple[Pod, ...] | None = None
        self.path = f"/api/v1/namespaces/{api.namespace}/pods"
        self._api = api
        self._selector = f"app.kubernetes.io/instance={deployment},app.kubernetes.io/component=node"
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Keep in step with the cluster, until cancelled. Raises EpdError: they cannot be listed a first time."""
        async for pods in self._api.follow(self.path, self._selector, Pod):
            self.pods = tuple(sorted(pods.values(), key=lambda one: one.metadata.name))
            self._changed.set()
            self._changed = asyncio.Event()

    async def changed(self) -> None:
        """Wait for a change of any pod."""
        await self._changed.wait()

    @property
    def there(self) -> tuple[Host, ...]:
        return tuple(one.host() for one in self.pods or () if one.is_host)

    @property
    def coming(self) -> bool:
        """There are pods that have yet to begin, or none at all."""
        pods = self.pods or ()
        new = (one.status.phase == "Pending" and one.metadata.deletion_timestamp is None for one in pods)
        return not pods or any(new)

    async def resource(self) -> str:
        """What devices are to Kubernetes; waits for a pod that says so."""
        while not self.pods:
            await self.changed()
        return self.pods[0].resource

    async def watch(self) -> AsyncIterator[tuple[Host, ...]]:
        told: tuple[Host, ...] | None = None
        while True:
            changed = self._changed
            if self.pods is not None and (now := self.there) != told:
                told = now
                yield now
            else:
                await changed.wait()

    async def find(self, id: str) -> str:
        return next((one.address for one in self.pods or () if one.id == id and one.runs), "")

    async def reach(self, id: str, clients: str = "") -> str:
        try:
            async with asyncio.timeout(START_S):
                while not (address := await self.find(id)):
                    if all(one.id != id for one in self.pods or ()):
                        raise EpdError(f"pod {id} has gone")
                    await self.changed()
                return address
        except TimeoutError:
            raise EpdError(f"the node process of pod {id} has not begun for {START_S:g} s") from None

    async def leave(self, id: str) -> None:
        """A pod keeps its node process."""

    async def parts(self) -> dict[str, int]:
        return {}


def kind_of(config: DeployConfig, resource: str) -> str:
    """Of the devices that pods with this resource lend."""
    if config.engine == "sim":
        return "cpu"
    if config.device != "auto":
        return config.device
    return "cuda" if "nvidia" in resource else "cpu" if resource == "cpu" else "npu"
