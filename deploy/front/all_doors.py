"""The front doors of a deployment on several machines as one. Nodes with some come and go by the word of somebody else.

Each is told the same, whole, whenever it changes and whenever it comes again. What the stages report is heard here as
it is there, for those who look; whether an instance has nothing left is for each node to say, beside its front
doors (`occupancy.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec
from prometheus_client import CollectorRegistry

from deploy.front.doors import rows_of
from deploy.front.remote import RemoteDoors
from deploy.front.traced import NodeTrace
from deploy.runtime.node_api import Following, FrontState, LostError, until_lost
from deploy.runtime.protocol import Observed
from epd_serve.errors import EpdError
from epd_serve.instances import IncarnationId
from epd_serve.key_files import read_key, stage_key
from epd_serve.roles import Role
from proxy.background import Background
from proxy.config.keys import ApiKeys
from proxy.config.settings import ProxySettings
from proxy.page.events import Status
from proxy.records.records import Question, RecordsAnswer, merged, unanswered
from proxy.registry.announcements import Announcements
from proxy.registry.instance_state import GRACE_S, NOTHING, Ledger, Tally, Work, total_of, whole
from proxy.registry.stage_metrics import register_stage_metrics
from proxy.registry.table import InstanceTable
from proxy.workers.metrics_aggregation import exposition, lasting, own_counts, summed
from proxy.workers.roster import Publisher
from proxy.workers.shared_counters import Asked
from proxy.workers.stage_scrape import StageScrape
from proxy.workers.wire import Family, Row, packed

COUNTS_S = 1.5
STAMPS_S = 20.0
"""The files may be large."""

PAUSABLE_S = 5.0

T = TypeVar("T")


class AllDoors(Following):
    """A `deploy.control.actuator.Doors` and `deploy.host.ending.Draining`, in one event loop, while `serve` runs.

    A call is about the nodes that are there; one that is lost meanwhile is left out, one that does not answer is waited
    for: the caller bounds the wait.

    Args:
        say: takes a line for the operator.
        key_file: of the deployment's key, on this machine, where instances announce over TCP.
        link_grace_s: as of `InstanceTable`.
        goes_on: front doors serve already by what a controller before this one has told.

    Attributes:
        table: what is known of the instances, and held of them by all front doors.
        registry: metrics of the deployment: who has some registers them.
        deployment: says what the deployment is, for the page of the admin listener.
    """

    def __init__(
        self,
        *,
        say: Callable[[str], None],
        key_file: str = "",
        link_grace_s: float = GRACE_S,
        goes_on: bool = False,
    ) -> None:
        super().__init__(say)
        self.deployment: Status | None = None
        self.background = Background()
        self.table = InstanceTable(ledger=_Total(self), link_grace_s=link_grace_s)
        self.fronts: dict[str, RemoteDoors] = {}
        self._published = Publisher(self.table, goes_on=goes_on)
        self._announcements = Announcements(self.table, self.table.report, self.background, key_file)
        self._registry = CollectorRegistry()
        register_stage_metrics(self._registry, self.table)
        self.registry = CollectorRegistry()
        bearer = stage_key(read_key(key_file, "key_file")) if key_file else ""
        self._scrape = StageScrape(self.table, self.registry, bearer)
        self._rows: tuple[Row, ...] | None = None
        self._wanted: tuple[Role, ...] = ()
        self._number = 0  # of the state that was told last
        self._paused_until = 0.0
        self._asked = Asked.SERVE
        self._settings = b""
        self._api_keys: ApiKeys | None = None
        self._past: list[Family] = []

    async def serve(self) -> None:
        """Until cancelled, which leaves the front doors as they are."""
        self._announcements.start()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await self._announcements.stop()
            await self.background.stop()
            for node in tuple(self.fronts):
                self.lose(node)
            await self.parted()

    def join(self, node: str, doors: RemoteDoors) -> None:
        """There are front doors on this node, too; those that it was said to have are asked by `doors` from now on."""
        self.lose(node)
        self.fronts[node] = doors
        doors.state, doors.node = self.state, node
        doors.stale.set()
        self.keep(
            node,
            doors.disconnect,
            self.repeat(doors.tell_news, f"the front doors of {node} are not told"),
            self.repeat(doors.follow, f"the front doors of {node} cannot be watched"),
        )

    def lose(self, node: str) -> None:
        """They have gone. What they did is still counted."""
        front = self.fronts.pop(node, None)
        if front is not None:
            self._past = summed([self._past, lasting(front.counts)])
            front.lost.set()
            self.drop(node)

    # What they are told.

    def publish(self, instances: Iterable[Observed], wanted: Iterable[Role]) -> None:
        """Everything that there is, and the roles that there are to be."""
        now = tuple(rows_of(instances)), tuple(sorted(wanted))
        if now != (self._rows, self._wanted):
            self._rows, self._wanted = now
            self._published.publish(*now)
            self._changed()

    def go_by(self, keys: ApiKeys) -> None:
        """From now on these are the clients' keys."""
        self._api_keys = keys
        self._changed()

    def drain(self, id: str, draining: bool = True) -> None:
        self._published.drain(id, draining)
        self._changed()

    def pause(self, seconds: float) -> None:
        self.table.pause_for(seconds)
        self._paused_until = time.monotonic() + seconds
        self._changed()

    @property
    def paused_s(self) -> float:
        return max(0.0, self._paused_until - time.monotonic())

    async def configure(self, settings: ProxySettings) -> None:
        """Of those that start from now on."""
        self._settings = packed(settings)
        self._changed()
        await self._of_all(lambda doors: doors.tell())

    async def seen(self) -> None:
        await self._of_all(lambda doors: doors.told("seen"))

    async def until_empty(self, id: str) -> None:
        await self._of_all(lambda doors: doors.told("until_empty", id))

    async def until_quiet(self, id: str) -> None:
        await self._of_all(lambda doors: doors.told("until_quiet", id))

    # What is known of them.

    @property
    def pids(self) -> Mapping[str, int]:
        """By node and name: `n1/front.0`."""
        return {f"{one.node}/{name}": pid for one in self._in_order() for name, pid in one.status.pids.items()}

    @property
    def replacing(self) -> bool:
        return any(one.status.replacing for one in self.fronts.values())

    async def ready(self) -> None:
        """Wait until all of them serve, and know what has been said. Raises EpdError: one does not start."""
        await self._of_all(lambda doors: doors.told("ready"))

    async def pausable_s(self) -> float:
        """Of the node that has the least room: who sends it what is nobody's decision here."""
        told = await self._of_all(lambda doors: doors.pausable_s(), PAUSABLE_S, but=(TimeoutError, LostError))
        return min(told, default=math.inf)

    async def metrics(self) -> bytes:
        """Prometheus text of all of them together, of the table, of the deployment, and of the stages. Front doors that
        do not answer in time count as they did."""
        asked = self._of_all(lambda doors: doors.counted(), COUNTS_S, but=(TimeoutError, EpdError))
        _, more = await asyncio.gather(asked, self._scrape.text())
        counts = [front.counts for front in self._in_order()]
        together = summed([self._past, *counts, own_counts(self.background.registry)])
        return exposition(self._registry, together) + more

    async def look(self, question: Question) -> RecordsAnswer:
        """What all of them know of requests. Who does not answer in time is left out, which counts say: of a node those
        workers that it had when it was heard last."""

        async def of(doors: RemoteDoors) -> RecordsAnswer:
            try:
                async with asyncio.timeout(COUNTS_S):
                    answer = await doors.look(question)
            except (TimeoutError, EpdError):
                return unanswered(question, len(doors.status.pids))
            for request in answer.requests:
                request["door"] = f"{doors.node}/{request['door']}"
            return answer

        return merged(question, await self._of_all(of))

    async def traced(self, subjects: Sequence[str]) -> list[NodeTrace]:
        """What is stamped on each node about these. Nodes of one host may have one folder: each stamp is told once."""
        told: set[tuple[float, str, str, str]] = set()
        nodes = []
        for node in await self._of_all(lambda doors: doors.traced(subjects), STAMPS_S, but=(TimeoutError, EpdError)):
            fresh = [one for one in node.stamps if one.name not in told]
            told |= {one.name for one in fresh}
            nodes.append(msgspec.structs.replace(node, stamps=fresh))
        return nodes

    async def restart(self) -> None:
        """Those of one node after the other: where new ones do not serve, those of the next nodes are left."""
        for front in self._in_order():
            with contextlib.suppress(LostError):
                await until_lost(front.restart(), front.lost)

    def tallies(self, incarnation: IncarnationId) -> list[Mapping[Work, Tally]]:
        """What the front doors of each node have given a life of an instance."""
        return [
            leases.tallies
            for one in self.fronts.values()
            for leases in one.status.leases
            if (leases.id, leases.incarnation) == incarnation
        ]

    # The end: `deploy.host.ending.Draining`.

    @property
    def running(self) -> int:
        return sum(one.status.running for one in self.fronts.values())

    def ask(self, asked: Asked) -> None:
        self._asked = max(self._asked, asked)
        self._changed()

    async def idle(self) -> None:
        await self._of_all(lambda doors: doors.told("idle"))

    async def end(self) -> None:
        """All of them, gracefully."""
        await self._of_all(lambda doors: doors.end())

    # How.

    def state(self) -> FrontState | None:
        """What they are to know now; None before anybody has said what there is."""
        if self._rows is None:
            return None
        self._number += 1
        return FrontState(
            self._number,
            self._rows,
            self._wanted,
            tuple(sorted(self._published.leaving)),
            self.paused_s,
            self._asked,
            self._settings,
            self._api_keys,
        )

    def _changed(self) -> None:
        for front in self.fronts.values():
            front.stale.set()

    async def _of_all(
        self,
        call: Callable[[RemoteDoors], Awaitable[T]],
        within_s: float | None = None,
        *,
        but: tuple[type[Exception], ...] = (LostError,),
    ) -> list[T]:
        """What those say that are there. `but`: by what one is left out; by default, where it is lost meanwhile."""

        async def of(front: RemoteDoors) -> list[T]:
            with contextlib.suppress(*but):
                async with asyncio.timeout(within_s):
                    return [await until_lost(call(front), front.lost)]
            return []

        told = await asyncio.gather(*(of(front) for front in self._in_order()))
        return [one for some in told for one in some]

    def _in_order(self) -> list[RemoteDoors]:
        return [self.fronts[node] for node in sorted(self.fronts)]


class _Total(Ledger):
    """Only reads: the sum of what all nodes say."""

    def __init__(self, doors: AllDoors) -> None:
        self._doors = doors

    def acquire(self, incarnation_id: IncarnationId, work: Work, weight: int) -> None:
        raise AssertionError("nothing is given here")

    def release(self, incarnation_id: IncarnationId, work: Work, weight: int) -> None:
        raise AssertionError("nothing is given here")

    def tallies(self, incarnation_id: IncarnationId) -> Mapping[Work, Tally]:
        told = self._doors.tallies(incarnation_id)
        return {
            work: total_of(one.get(work, nothing) for one in told) if told else nothing
            for work, nothing in NOTHING.items()
        }

    def forget(self, incarnation_id: IncarnationId) -> None:
        """Each node forgets for itself."""

    def total(self, incarnation_id: IncarnationId) -> Tally:
        return whole(self.tallies(incarnation_id))
