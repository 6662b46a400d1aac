"""The front door of a deployment: the proxy in this event loop, or several proxy processes behind the same socket."""

from __future__ import annotations

import asyncio
import importlib
import mmap
import os
import socket
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from deploy.host.ending import Draining
from deploy.host.environment import LAUNCH_ENV, LAUNCHER_PID_ENV, module_environment
from deploy.host.ports import BACKLOG
from proxy.registry.warm_links import GRACE_S

if TYPE_CHECKING:
    from deploy.launch.admin import Admin
    from deploy.launch.proxy_workers import ProxyWorkers
    from proxy.background import Background
    from proxy.cluster.membership import Membership
    from proxy.config.settings import ProxySettings
    from proxy.pipeline import Pipeline
    from proxy.registry.table import InstanceTable
    from proxy.stages.circuits import Circuits


class Front:
    """Serves `table` on a socket. The table is the caller's to keep up to date, in the loop that runs `serve`, by
    tasks of `background`: whether they run is part of being ready.

    Args:
        listening: bound to host and port; closed at the end.
        workers: proxy processes; 1 means this one.
        grace_s: how long requests in flight may go on at the end. drain_s: at the end of one of several workers.
        serves: told what drains, before it takes requests.
        say: takes a line for the operator.
        launch_id: marks the processes as those of a launch, or "".
        admin: has `/metrics` and `/instances`, which then leave the clients' port, and a head's calls of the cluster;
            its socket is closed at the end. It is this process that answers there, however many proxies there are.
        link_grace_s: as of `InstanceTable`.

    Raises:
        ConfigError: no room for what several processes share.
    """

    def __init__(
        self,
        settings: ProxySettings,
        listening: socket.socket,
        *,
        host: str,
        port: int,
        workers: int,
        grace_s: float,
        drain_s: float,
        serves: Callable[[Draining], None],
        say: Callable[[str], None],
        launch_id: str = "",
        admin: Admin | None = None,
        link_grace_s: float = GRACE_S,
    ) -> None:
        self.settings = replace(settings, observed=admin is None)
        self._admin = admin
        self._listening = listening
        self._at = (host, port)
        self._workers = workers
        self._grace_s = grace_s
        self._drain_s = drain_s
        self._serves = serves
        self._say = say
        self._launch_id = launch_id
        self._link_grace_s = link_grace_s
        self._memory = -1
        self.background = self._make_background()
        self.table = self._make_table()

    def _make_background(self) -> Background:
        from proxy.background import Background

        return Background()

    def _make_table(self) -> InstanceTable:
        from proxy.registry.table import InstanceTable

        if self._workers == 1:
            return InstanceTable(link_grace_s=self._link_grace_s)
        from proxy.workers.roster import ParentTable
        from proxy.workers.shared_counters import SharedCounters, shared_memory
        from proxy.workers.shared_ledger import COUNTS, SharedLedger

        self._listening.listen(BACKLOG)  # connections wait there while no worker is ready
        size_bytes = SharedCounters.size_bytes(self._workers, COUNTS)
        self._memory = shared_memory(size_bytes)
        self._counters = SharedCounters(mmap.mmap(self._memory, size_bytes), self._workers, COUNTS)
        return ParentTable(ledger=SharedLedger(self._counters, None), link_grace_s=self._link_grace_s)

    async def serve(self, members: Membership | None = None, cluster_key: str = "") -> None:
        """Until cancelled. The web framework loads in a thread, while others in this loop go on.

        Args:
            members, cluster_key: of the head of a cluster, which needs an admin listener.

        Raises:
            EpdError: a worker does not start.
        """
        framework = self._workers == 1 or self._admin is not None
        await asyncio.to_thread(importlib.import_module, "proxy.http.app" if framework else "proxy.workers.hub")
        from proxy.errors import most_telling

        assert members is None or self._admin is not None, "members call on the admin listener"
        answers = self._here() if self._workers == 1 else self._by_workers()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(answers.serving)
                if self._admin is not None:
                    group.create_task(self._serve_admin(self._admin, answers, members, cluster_key))
        except BaseExceptionGroup as failed:
            raise most_telling(failed) from None
        finally:
            await self.background.stop()

    async def _serve_admin(self, admin: Admin, answers: _Answers, members: Membership | None, cluster_key: str) -> None:
        from proxy.http.admin import create_admin
        from proxy.server.uvicorn_server import serve

        app = create_admin(
            self.table,
            answers.metrics,
            key=admin.key,
            circuits=answers.circuits,
            members=members,
            cluster_key=cluster_key,
        )
        await serve(app, "", 0, sockets=[admin.listening], grace_s=self._grace_s, background=self.background)

    def _here(self) -> _Answers:
        from proxy.http.app import create_app
        from proxy.server.uvicorn_server import serve

        app = create_app(self.settings, self.table, background=self.background)
        pipeline: Pipeline = app.state.pipeline
        self._serves(pipeline.drain)

        async def metrics() -> bytes:
            return pipeline.metrics.text()

        serving = serve(app, *self._at, sockets=[self._listening], grace_s=self._grace_s, background=self.background)
        return _Answers(serving, metrics, pipeline.circuits)

    def _by_workers(self) -> _Answers:
        from deploy.launch.proxy_workers import ProxyWorkers
        from proxy.workers.hub import WorkerHub
        from proxy.workers.limit_shares import share_of
        from proxy.workers.roster import ParentTable
        from proxy.workers.wire import Setup

        assert isinstance(self.table, ParentTable), "made for several workers"
        share = share_of(self.settings, self._workers)
        common = Setup(share, 0, self._workers, self._grace_s, self._drain_s, self._link_grace_s)
        hub = WorkerHub(self.table, common, self.background)
        self._serves(hub)
        environment = {**module_environment(), LAUNCHER_PID_ENV: str(os.getpid())}
        if self._launch_id:
            environment[LAUNCH_ENV] = self._launch_id
        workers = ProxyWorkers(
            hub,
            self._counters,
            self._memory,
            self._listening,
            environment,
            grace_s=self._grace_s,
            say=self._say,
        )
        return _Answers(self._run(workers), hub.metrics)

    async def _run(self, workers: ProxyWorkers) -> None:
        try:
            await workers.run()
        finally:
            self._listening.close()
            os.close(self._memory)


@dataclass(frozen=True)
class _Answers:
    """Who serves the clients' port, and what the admin listener tells of it. `circuits`: where one process has all."""

    serving: Coroutine[None, None, None]
    metrics: Callable[[], Awaitable[bytes]]
    circuits: Circuits | None = None
