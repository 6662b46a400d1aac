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
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

from deploy.cluster.hosts import Host
from deploy.kubernetes.api import ApiServer, Object
from deploy.options.config import DeployConfig
from epd_serve.errors import EpdError
from store.addresses import authority

DEVICES, RANGE = "epd-serve/devices", "epd-serve/nodes"
PORT_NAME, PORT, HASH = "node", 9443, "pod-template-hash"
START_S = 120.0
"""For a container to begin again."""


@dataclass(frozen=True)
class Pod:
    """What we read of a pod.

    Attributes:
        id: as long as its devices are the same. The next pod of a StatefulSet has the same name.
        begun: it has, and has not come to its end. runs: its node process does; else that begins again.
        address: where that is asked.
        resource: what its devices are to Kubernetes: the extended resource among its limits, or else CPUs.
        deployment: the name of the Deployment that has it; "": none has.
    """

    id: str
    name: str
    ip: str
    address: str
    pending: bool
    begun: bool
    runs: bool
    leaving: bool
    resource: str
    deployment: str
    annotations: Mapping[str, str]

    @classmethod
    def of(cls, object: Object) -> Pod:
        meta, node, status = object["metadata"], object["spec"]["containers"][0], object["status"]
        ports = (one["containerPort"] for one in node.get("ports", ()) if one.get("name") == PORT_NAME)
        states = [one["state"] for one in status.get("containerStatuses", ()) if one["name"] == node["name"]]
        phase, ip = status.get("phase", ""), status.get("podIP", "")
        suffix = f"-{meta['labels'].get(HASH, '')}"
        owners = (one["name"] for one in meta.get("ownerReferences", ()) if one["kind"] == "ReplicaSet")
        return cls(
            id=f"{meta['name']}.{meta['uid'][:8]}",
            name=meta["name"],
            ip=ip,
            address=authority(ip, next(ports, PORT)),
            pending=phase == "Pending",
            begun=phase == "Running" and bool(ip),
            runs=phase == "Running" and bool(ip) and any("running" in one for one in states),
            leaving="deletionTimestamp" in meta,
            resource=next((name for name in node["resources"].get("limits", ()) if "/" in name), "cpu"),
            deployment=next((name.removesuffix(suffix) for name in owners if name.endswith(suffix)), ""),
            annotations=meta.get("annotations", {}),
        )

    def host(self) -> Host:
        told = self.annotations.get(DEVICES, "0")
        devices = int(told) if told.isdecimal() else 0
        about = f"{devices} {self.resource}, by its annotation {DEVICES}"
        return Host(self.id, self.name, devices, self.ip, about, self.leaving)


class KubernetesHosts:
    """As `deploy.cluster.hosts.Hosts`, while `run` does.

    Attributes:
        pods: that there are, those that have not begun, too; None before they are known.
        api: where they are asked for; path: of pods in their namespace there.
    """

    def __init__(self, api: ApiServer, deployment: str) -> None:
        self.pods: tuple[Pod, ...] | None = None
        self.path = f"/api/v1/namespaces/{api.namespace}/pods"
        self.api = api
        self._selector = f"app.kubernetes.io/instance={deployment},app.kubernetes.io/component=node"
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Keep in step with the cluster, until cancelled. Raises EpdError: they cannot be listed a first time."""
        async for pods in self.api.follow(self.path, self._selector):
            self.pods = tuple(Pod.of(pods[name]) for name in sorted(pods))
            self._changed.set()
            self._changed = asyncio.Event()

    async def changed(self) -> None:
        """Wait for a change of any pod."""
        await self._changed.wait()

    @property
    def there(self) -> tuple[Host, ...]:
        return tuple(one.host() for one in self.pods or () if one.begun)

    @property
    def coming(self) -> bool:
        """There are pods that have yet to begin, or none at all."""
        pods = self.pods or ()
        return not pods or any(one.pending and not one.leaving for one in pods)

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
