"""How many node pods there should be: told as metrics to whoever scales them, or done here where the pods allow that.

Whoever gives up pods of a Deployment chooses those of the least deletion cost: what is in use costs more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from deploy.cluster.hosts import Host
from deploy.cluster.leases import ClusterLeases
from deploy.kubernetes.hosts import RANGE, KubernetesHosts
from deploy.runtime.leases import Place
from epd_serve.errors import ConfigError, EpdError

COST, IN_USE, UNUSED = "controller.kubernetes.io/pod-deletion-cost", "1000", "0"
LEFT_OUT = "epd-serve/left-out"
"""The annotation that says why a pod is no part of the deployment; it is not Ready either."""

LOOK_S = 1.0
UNUSED_S = 120.0
"""For so long fewer pods must have been enough before there are fewer."""

AGAIN_S = 5.0
"""After what was refused."""


def pods_wanted(hosts: Sequence[Host], places: Collection[Place], widths: Sequence[int]) -> int:
    """The fewest pods, at least one, that have room for all that is leased, where it is, and for more of these widths.

    Args:
        hosts: that there are; a width that none of them could ever have counts for nothing.
    """
    size = max((one.devices for one in hosts), default=0)
    taken = {one.id: sum(place.width for place in places if place.node == one.id) for one in hosts}
    room = [one.devices - taken[one.id] for one in hosts if taken[one.id]]
    for width in sorted([*widths, *(one.width for one in places if one.node not in taken)], reverse=True):
        at = next((at for at, free in enumerate(room) if free >= width), None)
        if at is not None:
            room[at] -= width
        elif width <= size:
            room.append(size - width)
    return max(1, len(room))


def range_of(text: str) -> tuple[int, int]:
    """Reads `FIRST-LAST`. Raises ConfigError: it is no such range."""
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise ConfigError(f"annotation {RANGE}: {text!r} is not FIRST-LAST, as 1-8", param=RANGE)
    return int(first), int(last)


class PodScale(Collector):
    """`epd_control_nodes*`, and what is done about it.

    Args:
        hosts: whose pods it is about.
        say: takes a line for the operator.

    Attributes:
        leases: of their devices. left_out: pods that are no part of the deployment, and why.
        wanted: how many pods have room for all that is leased and wanted.
        unused_s: how long pods are kept that nobody needs.
    """

    leases: ClusterLeases

    def __init__(self, hosts: KubernetesHosts, say: Callable[[str], None] = lambda line: None) -> None:
        self.left_out: Mapping[str, str] = {}
        self.wanted = 1
        self.unused_s = UNUSED_S
        self._hosts = hosts
        self._say = say

    def collect(self) -> Iterator[Metric]:
        there = self._hosts.there
        yield GaugeMetricFamily("epd_control_nodes", "Node pods that live (--runtime kubernetes).", len(there))
        yield GaugeMetricFamily(
            "epd_control_nodes_left_out",
            "Those of them that differ from the others, or in version from the controller (--runtime kubernetes): "
            "their annotation epd-serve/left-out says in what.",
            sum(one.id in self.left_out for one in there),
        )
        yield GaugeMetricFamily(
            "epd_control_nodes_wanted",
            "Node pods that have room for all that is leased and wanted (--runtime kubernetes): their replicas.",
            self.wanted,
        )

    async def run(self) -> None:
        """Until cancelled."""
        enough_since, again_at = time.monotonic(), 0.0
        while True:
            places = await self.leases.places()
            self.wanted = pods_wanted(self._hosts.there, places, self.leases.wanted)
            now = time.monotonic()
            if self.wanted >= len(self._hosts.pods or ()):
                enough_since = now
            if now >= again_at:
                try:
                    await self._mark({place.node for place in places})
                    await self.scale(less=now - enough_since > self.unused_s)
                except EpdError as error:
                    self._say(f"warning: pods are not scaled: {error}")
                    again_at = now + AGAIN_S
            await asyncio.sleep(LOOK_S)

    async def _mark(self, used: Collection[str]) -> None:
        """Have those be given up first on which nothing is leased, and those that are left out say why. Raises
        EpdError."""
        for pod in self._hosts.pods or ():
            had = {COST: pod.annotations.get(COST, UNUSED), LEFT_OUT: pod.annotations.get(LEFT_OUT)}
            cost = IN_USE if pod.host.id in used else UNUSED
            marks = {COST: cost, LEFT_OUT: self.left_out.get(pod.host.id)}
            if marks != had and not pod.host.leaving:
                await self._hosts.api.annotate(f"{self._hosts.path}/{pod.host.name}", marks)

    async def scale(self, *, less: bool = False) -> bool:
        """Have as many pods as are wanted, or more. `less`: for long enough fewer have been wanted.

        Returns:
            Whether there are to be as many, as far as it is allowed to see to that.

        Raises:
            EpdError: it is refused, or not carried out in time.
        """
        pods = self._hosts.pods or ()
        pod = next((one for one in pods if one.deployment and one.annotations.get(RANGE)), None)
        if pod is None:
            return self.wanted <= len(pods)
        first, last = range_of(pod.annotations[RANGE])
        count = min(max(self.wanted, first), last)
        if count > len(pods) or (less and count < len(pods)):
            path = f"/apis/apps/v1/namespaces/{self._hosts.api.namespace}/deployments/{pod.deployment}"
            had, has = await self._hosts.api.rescale(path, lambda now: count if less else max(count, now))
            if had != has:
                self._say(f"{pod.deployment} is scaled from {had} to {has} pods")
        return self.wanted <= count
