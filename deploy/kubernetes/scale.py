"""How many node pods there should be: told as metrics to whoever scales them, or done here where the pods allow that.

Whoever gives up pods of a Deployment chooses those of the least deletion cost: what is in use costs more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from deploy.cluster.hosts import Host
from deploy.cluster.leases import ClusterLeases
from deploy.kubernetes.api import ApiServer
from deploy.kubernetes.hosts import RANGE, KubernetesHosts, Pod
from deploy.runtime.leases import Place
from epd_serve.errors import ConfigError, EpdError

COST, IN_USE = "controller.kubernetes.io/pod-deletion-cost", "1000"
LOOK_S = 1.0
UNUSED_S = 120.0
"""For so long fewer pods must have been enough before there are fewer."""

AGAIN_S = 15.0
"""After what was refused."""

logger = logging.getLogger(__name__)


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
        say: takes a line for the operator.

    Attributes:
        wanted: how many pods have room for all that is leased and wanted.
        unused_s: how long pods are kept that nobody needs.
    """

    def __init__(self, say: Callable[[str], None] = lambda line: None) -> None:
        self.wanted = 1
        self.unused_s = UNUSED_S
        self.say = say
        self._hosts: KubernetesHosts | None = None

    def follow(self, api: ApiServer, hosts: KubernetesHosts, leases: ClusterLeases) -> None:
        """These are what it is about."""
        self._api, self._hosts, self._leases = api, hosts, leases

    def collect(self) -> Iterator[Metric]:
        there = len(self._hosts.there) if self._hosts is not None else 0
        yield GaugeMetricFamily("epd_control_nodes", "Node pods that live (--runtime kubernetes).", there)
        yield GaugeMetricFamily(
            "epd_control_nodes_wanted",
            "Node pods that have room for all that is leased and wanted (--runtime kubernetes): their replicas.",
            self.wanted,
        )

    async def run(self) -> None:
        """Until cancelled."""
        assert self._hosts is not None, "follow() has been called"
        enough_since, again_at = time.monotonic(), 0.0
        while True:
            places = await self._leases.places()
            pods = self._hosts.pods or ()
            self.wanted = pods_wanted(self._hosts.there, places, self._leases.wanted)
            now = time.monotonic()
            if self.wanted >= len(pods):
                enough_since = now
            if now >= again_at:
                try:
                    await self._cost(self._api, pods, {place.node for place in places})
                    await self.scale(self._api, pods, less=now - enough_since > self.unused_s)
                except EpdError as error:
                    self.say(f"warning: pods are not scaled: {error}")
                    again_at = now + AGAIN_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._hosts.changed()

    async def _cost(self, api: ApiServer, pods: Sequence[Pod], used: Collection[str]) -> None:
        """Have those be given up first on which nothing is leased. Raises EpdError."""
        for pod in pods:
            cost = IN_USE if pod.id in used else "0"
            if not pod.leaving and pod.annotations.get(COST, "0") != cost:
                await api.annotate(f"/api/v1/namespaces/{api.namespace}/pods/{pod.name}", {COST: cost})

    async def scale(self, api: ApiServer, pods: Sequence[Pod], *, less: bool = False) -> bool:
        """Have as many pods as are wanted, or more. `less`: for long enough fewer have been wanted.

        Returns:
            Whether there are to be as many, as far as it is allowed to see to that.

        Raises:
            EpdError: it is refused, or not carried out in time.
        """
        pod = next((one for one in pods if one.deployment and one.annotations.get(RANGE)), None)
        if pod is None:
            return self.wanted <= len(pods)
        first, last = range_of(pod.annotations[RANGE])
        aim = min(max(self.wanted, first), last)
        if aim == len(pods) or (aim < len(pods) and not less):
            return self.wanted <= aim
        path = f"/apis/apps/v1/namespaces/{api.namespace}/deployments/{pod.deployment}"
        had, has = await api.rescale(path, lambda count: aim if less else max(aim, count))
        if had != has:
            self.say(f"{pod.deployment} is scaled from {had} to {has} pods")
        return self.wanted <= aim
