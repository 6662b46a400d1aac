"""The front doors of a deployment as whoever runs it sees them: told of the instances, paused, drained, replaced.

They are processes of their own, also where there is only one: whatever becomes of them leaves the stages alone, and
whatever becomes of their parent's other work leaves clients alone. What must agree between them lies in memory that
they share, what they are told goes over a socket in the run directory.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.front.lives import POLL_S, FrontLives
from deploy.front.occupancy import until_empty, until_quiet
from deploy.front.shared import Shared, Slots, pausable_s
from deploy.front.traced import NodeTrace
from deploy.host.children import Children
from deploy.host.environment import LAUNCH_ENV, LAUNCHER_PID_ENV, module_environment
from deploy.host.state import State
from deploy.runtime.protocol import Observed, Phase
from epd_serve.instances import IncarnationId
from epd_serve.phases.stamps import Stamp, stamps_about
from epd_serve.roles import Role
from epd_serve.trace import clock_id
from proxy.registry.instance_state import GRACE_S
from proxy.workers.shared_counters import Asked, Cell

if TYPE_CHECKING:
    from proxy.config.keys import ApiKeys
    from proxy.config.settings import ProxySettings
    from proxy.page.events import Status
    from proxy.records.records import Question, RecordsAnswer
    from proxy.registry.instance_state import Tally, Work
    from proxy.workers.hub import WorkerHub
    from proxy.workers.wire import Family, Row


class FrontDoors:
    """In the event loop that runs `serve`, a `deploy.host.ending.Draining`.

    Args:
        shared: what they have in common.
        children: starts their processes. state: says which there are already, which go on as they are.
        grace_s: how long requests in flight may go on at the end. drain_s: at the end of one of them.
        say: takes a line for the operator.
        launch_id: marks the processes as those of a launch, or "".
        link_grace_s: as of `InstanceTable`.

    Attributes:
        table: what is known of the instances.
        background: tasks that feed it; what of them is down is part of being ready.
        registry: metrics of the deployment: who has some registers them.
        deployment: says what the deployment is, for the page; None where nobody here knows.
    """

    def __init__(
        self,
        settings: ProxySettings,
        shared: Shared,
        children: Children,
        state: State,
        *,
        grace_s: float,
        drain_s: float,
        say: Callable[[str], None],
        launch_id: str = "",
        link_grace_s: float = GRACE_S,
    ) -> None:
        from prometheus_client import CollectorRegistry

        from proxy.background import Background
        from proxy.registry.table import InstanceTable
        from proxy.workers.roster import Publisher
        from proxy.workers.shared_counters import SharedLedger
        from proxy.workers.wire import Setup, share_of

        self._settings = settings
        self._api_keys = settings.api_keys
        self._shared = shared
        self._children = children
        self._state = state
        self._counters = counters = shared.counters()
        self._setup = Setup(share_of(settings, shared.workers), counters.rows, grace_s, drain_s, link_grace_s)
        self._say = say
        self._launch_id = launch_id
        self._lives: FrontLives | None = None
        self._hub: WorkerHub | None = None
        self._started = asyncio.Event()
        self.deployment: Status | None = None
        self.background = Background()
        seen = max(counters.said(row, Cell.ROSTER) for row in range(counters.rows))
        self._ledger = SharedLedger(counters, None)
        self.table = InstanceTable(ledger=self._ledger, link_grace_s=link_grace_s)
        slots = Slots(state, self._ledger, counters.slots)
        self._published = Publisher(self.table, slots, after=seen, goes_on=seen > 0)
        self.registry = CollectorRegistry()

    async def serve(self) -> None:
        """Until cancelled, which leaves the processes as they are: `end` comes before that, or another life.

        Raises:
            EpdError: a front door does not start.
        """
        await asyncio.to_thread(importlib.import_module, "proxy.workers.hub")  # others in this loop go on
        from proxy.page.events import observed
        from proxy.workers.hub import WorkerHub
        from proxy.workers.stage_scrape import StageScrape

        environment = {**module_environment(), LAUNCHER_PID_ENV: str(self._children.root)}
        if self._launch_id:
            environment[LAUNCH_ENV] = self._launch_id
        scrape = StageScrape(self.table, self.registry, self._settings.bearer_of_stages())
        hub = self._hub = WorkerHub(
            self.table,
            self._published,
            self._shared.feed,
            self.background,
            observed(self),
            self._settings.key_file,
            scrape.text,
            self._api_keys,
        )
        lives = self._lives = FrontLives(
            self._children, self._state, hub, self._shared, self._counters, environment, self._setup, self._say
        )
        try:
            self._started.set()
            await lives.run()
        finally:
            await hub.stop()
            await self.background.stop()

    async def end(self) -> None:
        """All of them, gracefully. After that connections are refused, whoever else holds the socket."""
        if self._lives is not None:
            await self._lives.end()
        self._shared.refuse()

    async def ready(self) -> None:
        """Wait until all of them serve, and know what has been said."""
        await self._started.wait()
        assert self._lives is not None
        await self._lives.begun()
        await self.seen()

    # What they are told.

    def publish(self, instances: Iterable[Observed], wanted: Iterable[Role]) -> None:
        """Everything that there is, and the roles that there are to be."""
        self.tell(rows_of(instances), wanted)

    def tell(self, rows: Iterable[Row], wanted: Iterable[Role]) -> None:
        """The same, as front doors are told."""
        self._published.publish(rows, wanted)

    def go_by(self, keys: ApiKeys) -> None:
        """From now on these are the clients' keys."""
        self._api_keys = keys
        if self._hub is not None:
            self._hub.go_by(keys)

    def drain(self, id: str, draining: bool = True) -> None:
        """Give an instance nothing new, until it is taken back or gone; what it has goes on."""
        self._published.drain(id, draining)

    @property
    def leaving(self) -> frozenset[str]:
        """Those that are given nothing new by `drain`."""
        return self._published.leaving

    def pause(self, seconds: float) -> None:
        """Have new requests wait for so long at most; 0: no longer."""
        self._published.pause(seconds)

    @property
    def paused_s(self) -> float:
        """For how long they wait yet."""
        return self.table.pause.left_s

    async def pausable_s(self) -> float:
        """For how long requests may wait, if they come as they do now, before one is refused."""
        return await pausable_s(self._settings, self._counters)

    async def seen(self) -> None:
        """Wait until all go by what has been said until now. Who does not soon is killed, and followed by another."""
        if self._lives is not None:
            await self._lives.prompt(self._published.number)

    async def until_empty(self, id: str) -> None:
        """Returns when nothing is under way on an instance that is given nothing new, or it has gone."""
        await until_empty(self.table, self.seen, id)

    async def until_quiet(self, id: str) -> None:
        """Returns when no prefill is under way on it and no KV has yet to leave, or it has gone."""
        await until_quiet(self.table, self.seen, id)

    # What is known of them.

    def tallies(self) -> Mapping[IncarnationId, Mapping[Work, Tally]]:
        """What all of them have given the present lives of all instances, counted since they are known."""
        names = [view.instance.incarnation_id for view in self.table.snapshot()]
        return {name: self._ledger.tallies(name) for name in names}

    @property
    def pids(self) -> Mapping[str, int]:
        """Of the processes, by name: `front.0`."""
        return self._lives.pids if self._lives is not None else {}

    @property
    def replacing(self) -> bool:
        """Whether they are being replaced one by one."""
        return self._lives is not None and self._lives.replacing

    async def metrics(self) -> bytes:
        """Prometheus text of all of them together, of the table, of the deployment, and of the stages."""
        await self._started.wait()
        assert self._hub is not None
        return await self._hub.metrics()

    async def counted(self) -> list[Family]:
        """What all of them together have counted, without the table."""
        await self._started.wait()
        assert self._hub is not None
        return await self._hub.counted()

    async def look(self, question: Question) -> RecordsAnswer:
        """What all of them know of requests."""
        await self._started.wait()
        assert self._hub is not None
        return await self._hub.look(question)

    async def stamps(self, subjects: Sequence[str]) -> list[Stamp]:
        """What front doors and stages of this node have stamped about these, where it is traced."""
        path = self._settings.trace_path
        if not path or not subjects:
            return []
        return await asyncio.to_thread(stamps_about, Path(path).parent, subjects, clock_id())

    async def traced(self, subjects: Sequence[str]) -> list[NodeTrace]:
        """The same, as all that there is: one machine has one clock."""
        return [NodeTrace(stamps=await self.stamps(subjects))]

    async def configure(self, settings: ProxySettings) -> None:
        """Of those that start from now on."""
        from msgspec.structs import replace

        from proxy.workers.wire import share_of

        await self._started.wait()
        assert self._lives is not None
        self._lives.setup = replace(self._setup, settings=share_of(settings, self._shared.workers))

    async def restart(self) -> None:
        """Replace them one by one, each by one that serves before it leaves.

        Raises:
            EpdError: another one does not start; those that are left serve on.
        """
        await self._started.wait()
        assert self._lives is not None
        await self._lives.replace()

    # The end: `deploy.host.ending.Draining`.

    @property
    def running(self) -> int:
        """Requests in flight, as of a moment ago."""
        return self._counters.total(Cell.REQUESTS)

    def ask(self, asked: Asked) -> None:
        self._counters.ask(asked)

    async def idle(self) -> None:
        """Wait until nothing is left anywhere; whoever waits sets the deadline."""
        counters = self._counters
        while self._lives is not None and not all(  # noqa: ASYNC110 - other processes write there
            counters.said(row, Cell.OBEYED) == Asked.DRAIN and not counters.said(row, Cell.REQUESTS)
            for row in self._lives.serving
        ):
            await asyncio.sleep(POLL_S)


def rows_of(instances: Iterable[Observed]) -> list[Row]:
    """What front doors are told of instances; of one that has no life yet nothing."""
    from proxy.workers.wire import Row

    return [
        Row(one.instance, one.serves, "" if one.serves else one.reason or one.phase.value, one.phase is Phase.DRAINING)
        for one in instances
        if one.instance is not None
    ]
