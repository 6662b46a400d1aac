"""The front doors of a deployment as whoever runs it sees them: told of the instances, paused, drained, replaced.

They are processes of their own, also where there is only one: whatever becomes of them leaves the stages alone, and
whatever becomes of their parent's other work leaves clients alone. What must agree between them lies in memory that
they share, what they are told goes over a socket in the run directory.
"""

from __future__ import annotations

import asyncio
import importlib
import mmap
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.front.lives import POLL_S, FrontLives
from deploy.host.environment import LAUNCH_ENV, LAUNCHER_PID_ENV, module_environment
from deploy.host.ports import BACKLOG
from deploy.runtime.protocol import Observed, Phase
from epd_serve.instances import Instance
from epd_serve.roles import Role
from proxy.registry.warm_links import GRACE_S

if TYPE_CHECKING:
    from proxy.config.settings import ProxySettings
    from proxy.registry.instance_state import Work
    from proxy.workers.hub import WorkerHub


class FrontDoors:
    """In the event loop that runs `serve`, a `deploy.host.ending.Draining`.

    Args:
        listening: bound to host and port; closed at the end.
        feed: where the socket is to be that they connect to.
        workers: how many there are.
        grace_s: how long requests in flight may go on at the end. drain_s: at the end of one of them.
        say: takes a line for the operator.
        launch_id: marks the processes as those of a launch, or "".
        link_grace_s: as of `InstanceTable`.

    Attributes:
        table: what is known of the instances. Told by `publish`, or directly by whoever watches them.
        background: tasks that feed it; what of them is down is part of being ready.

    Raises:
        ConfigError: no room for what they share.
    """

    def __init__(
        self,
        settings: ProxySettings,
        listening: socket.socket,
        feed: Path,
        *,
        workers: int,
        grace_s: float,
        drain_s: float,
        say: Callable[[str], None],
        launch_id: str = "",
        link_grace_s: float = GRACE_S,
    ) -> None:
        from proxy.background import Background
        from proxy.workers.limit_shares import share_of
        from proxy.workers.roster import ParentTable
        from proxy.workers.shared_counters import SharedCounters, shared_memory
        from proxy.workers.shared_ledger import COUNTS, SharedLedger
        from proxy.workers.wire import Setup

        listening.listen(BACKLOG)  # connections wait there while nobody is ready
        rows = workers + 1  # who follows another one begins before that ends
        size_bytes = SharedCounters.size_bytes(rows, COUNTS)
        self._memory = shared_memory(size_bytes)
        self._counters = SharedCounters(mmap.mmap(self._memory, size_bytes), rows, COUNTS)
        self._listening = listening
        self._feed = feed
        self._workers = workers
        self._setup = Setup(share_of(settings, workers), rows, grace_s, drain_s, link_grace_s)
        self._say = say
        self._launch_id = launch_id
        self._leaving: set[str] = set()
        self._draining: set[str] = set()
        self._known: dict[str, Instance] = {}
        self._lives: FrontLives | None = None
        self._hub: WorkerHub | None = None
        self._started = asyncio.Event()
        self._replacing = asyncio.Lock()
        self.background = Background()
        self.table = ParentTable(ledger=SharedLedger(self._counters, None), link_grace_s=link_grace_s)

    async def serve(self) -> None:
        """Until cancelled.

        Raises:
            EpdError: a front door does not start.
        """
        await asyncio.to_thread(importlib.import_module, "proxy.workers.hub")  # others in this loop go on
        from proxy.workers.hub import WorkerHub

        hub = self._hub = WorkerHub(self.table, self._feed, self.background)
        lives = self._lives = FrontLives(
            hub,
            self._setup,
            self._counters,
            self._memory,
            self._listening,
            self._feed,
            self._environment(),
            grace_s=self._setup.grace_s,
            say=self._say,
        )
        try:
            await hub.start()
            self._started.set()
            await lives.run()
        finally:
            await hub.stop()
            await self.background.stop()
            self._listening.close()
            os.close(self._memory)

    async def ready(self) -> None:
        """Wait until all of them serve, and know what has been said."""
        await self._started.wait()
        assert self._lives is not None
        await self._lives.begun()
        await self.seen()

    # What they are told.

    def publish(self, instances: Iterable[Observed], wanted: Iterable[Role]) -> None:
        """Everything that there is, and the roles that there are to be."""
        self.table.want(wanted)
        present = [(one.instance, one) for one in instances if one.instance is not None]
        before, self._known = self._known, {instance.id: instance for instance, _ in present}
        for gone in before.keys() - self._known.keys():
            self.table.remove(gone)
            self._leaving.discard(gone)
        self._draining = {instance.id for instance, one in present if one.phase is Phase.DRAINING}
        for instance, one in present:
            name = instance.id
            if instance != before.get(name):
                self.table.apply(instance, up=False)
            self._drain(name)
            if one.serves:
                self.table.mark_up(name)
            else:
                self.table.mark_down(name, one.reason or one.phase.value)

    def drain(self, id: str) -> None:
        """Give an instance nothing new, until it is taken back or gone; what it has goes on."""
        self._leaving.add(id)
        self._drain(id)

    def take_back(self, id: str) -> None:
        self._leaving.discard(id)
        self._drain(id)

    def _drain(self, id: str) -> None:
        if id in self._known:
            self.table.drain(id, id in self._leaving or id in self._draining)

    def pause(self, seconds: float) -> None:
        """Have new requests wait for so long at most."""
        self.table.pause_for(seconds)

    def resume(self) -> None:
        self.table.pause_for(0)

    @property
    def paused_s(self) -> float:
        """For how long they wait yet."""
        return self.table.pause.left_s

    async def seen(self) -> None:
        """Wait until all go by what has been said until now. Who does not soon is killed, and followed by another."""
        if self._lives is not None:
            await self._lives.prompt(self.table.number)

    # What is known of them.

    def leases(self, id: str) -> Mapping[Work, int]:
        """What all of them have under way on the present life of an instance; nothing of one that is not known."""
        views = (view for view in self.table.snapshot() if view.instance.id == id)
        return next((view.in_flight for view in views), {})

    @property
    def pids(self) -> Mapping[str, int]:
        """Of the processes, by name: `front.0`."""
        return self._lives.pids if self._lives is not None else {}

    async def metrics(self) -> bytes:
        """Prometheus text of all of them together, and of the table."""
        await self._started.wait()
        assert self._hub is not None
        return await self._hub.metrics()

    async def restart(self, settings: ProxySettings | None = None) -> None:
        """Replace them one by one, each by one that serves before it leaves. `settings`: of those that start from now
        on.

        Raises:
            EpdError: another one does not start; those that are left serve on.
        """
        from msgspec.structs import replace

        from proxy.workers.limit_shares import share_of

        await self._started.wait()
        assert self._lives is not None
        async with self._replacing:
            if settings is not None:
                self._lives.setup = replace(self._setup, settings=share_of(settings, self._workers))
            await self._lives.replace()

    # The end: `deploy.host.ending.Draining`.

    @property
    def running(self) -> int:
        """Requests in flight, as of a moment ago."""
        return sum(self._counters.requests(row) for row in range(self._counters.rows))

    def announce(self) -> None:
        from proxy.workers.shared_counters import Asked

        self._counters.ask(Asked.LEAVE)

    def begin(self) -> None:
        from proxy.workers.shared_counters import Asked

        self._counters.ask(Asked.DRAIN)

    async def idle(self) -> None:
        """Wait until nothing is left anywhere; whoever waits sets the deadline."""
        from proxy.workers.shared_counters import Asked

        counters = self._counters
        while self._lives is not None and not all(  # noqa: ASYNC110 - other processes write there
            counters.obeyed(worker.row) is Asked.DRAIN and not counters.requests(worker.row)
            for worker in (life.worker for life in self._lives.living)
            if worker.serving
        ):
            await asyncio.sleep(POLL_S)

    def _environment(self) -> dict[str, str]:
        environment = {**module_environment(), LAUNCHER_PID_ENV: str(os.getpid())}
        return environment | ({LAUNCH_ENV: self._launch_id} if self._launch_id else {})
