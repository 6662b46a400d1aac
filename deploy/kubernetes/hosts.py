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
from epd_serve.errors import EpdError
from store.addresses import authority

DEVICES, RANGE = "epd-serve/devices", "epd-serve/nodes"
PORT_NAME, PORT, HASH = "node", 9443, "pod-template-hash"


@dataclass(frozen=True)
class Pod:
    """What we read of a pod.

    Attributes:
        host: that it is, as long as its devices are the same. The next pod of a StatefulSet has the same name.
        pending: it has not begun. begun: it has, and has not come to its end.
        node: `HOST:PORT` of its node process; "" while that does not run, which begins again.
        deployment: the name of the Deployment that has it; "": none has.
    """

    host: Host
    pending: bool
    begun: bool
    node: str
    deployment: str
    annotations: Mapping[str, str]

    @classmethod
    def of(cls, object: Object) -> Pod:
        meta, container, status = object["metadata"], object["spec"]["containers"][0], object["status"]
        ports = (one["containerPort"] for one in container.get("ports", ()) if one.get("name") == PORT_NAME)
        states = [one["state"] for one in status.get("containerStatuses", ()) if one["name"] == container["name"]]
        phase, ip, annotations = status.get("phase"), status.get("podIP", ""), meta.get("annotations", {})
        begun = phase == "Running" and bool(ip)
        runs = begun and any("running" in one for one in states)
        suffix = f"-{meta['labels'].get(HASH, '')}"
        owners = (one["name"] for one in meta.get("ownerReferences", ()) if one["kind"] == "ReplicaSet")
        told = annotations.get(DEVICES, "0")
        host = Host(
            id=f"{meta['name']}.{meta['uid'][:8]}",
            name=meta["name"],
            devices=int(told) if told.isdecimal() else 0,
            address=ip,
            about=f"{told} by its annotation {DEVICES}",
            leaving="deletionTimestamp" in meta,
        )
        return cls(
            host,
            pending=phase == "Pending",
            begun=begun,
            node=authority(ip, next(ports, PORT)) if runs else "",
            deployment=next((name.removesuffix(suffix) for name in owners if name.endswith(suffix)), ""),
            annotations=annotations,
        )


class KubernetesHosts:
    """As `deploy.cluster.hosts.Hosts`, while `run` does.

    Attributes:
        pods: that there are, those that have not begun, too; None before they are known.
        api: where they are asked for; path: of pods in their namespace there.
    """

    def __init__(self, api: ApiServer, deployment: str) -> None:
        self.pods: tuple[Pod, ...] | None = None
        self.api = api
        self.path = f"/api/v1/namespaces/{api.namespace}/pods"
        self._selector = f"app.kubernetes.io/instance={deployment},app.kubernetes.io/component=node"
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Keep in step with the cluster, until cancelled. Raises EpdError: they cannot be listed a first time."""
        async for pods in self.api.follow(self.path, self._selector):
            self.pods = tuple(Pod.of(pods[name]) for name in sorted(pods))
            self._changed.set()
            self._changed = asyncio.Event()

    @property
    def there(self) -> tuple[Host, ...]:
        return tuple(one.host for one in self.pods or () if one.begun)

    @property
    def coming(self) -> bool:
        """There are pods that have yet to begin, or none at all."""
        pods = self.pods or ()
        return not pods or any(one.pending and not one.host.leaving for one in pods)

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
        return next((one.node for one in self.pods or () if one.host.id == id), "")

    async def reach(self, id: str, clients: str = "") -> str:
        """Whoever asks does so again: kubelet starts its container again."""
        if node := await self.find(id):
            return node
        raise EpdError(f"the node process of pod {id} does not run")

    async def leave(self, id: str) -> None:
        """A pod keeps its node process."""

    async def parts(self) -> dict[str, int]:
        return {}
