"""The front door of what is started by itself: the proxy in this event loop, or several processes behind its socket."""

from __future__ import annotations

import asyncio
import importlib
import socket
import tempfile
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.front.doors import FrontDoors
from deploy.front.shared import Shared
from deploy.host.ending import Draining
from deploy.host.ports import private_socket
from deploy.keeper.in_process import InProcess
from deploy.launch.admin import Admin, serve_admin
from proxy.registry.warm_links import GRACE_S

if TYPE_CHECKING:
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
        self._grace_s = grace_s
        self._serves = serves
        self._doors: FrontDoors | None = None
        self._stack = ExitStack()
        if workers > 1:
            folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="epd-")))
            feed = self._stack.enter_context(private_socket(folder / "feed"))
            shared = Shared.of(listening, feed, workers)
            self._stack.callback(shared.close)
            self._doors = FrontDoors(
                self.settings,
                shared,
                InProcess(),
                grace_s=grace_s,
                drain_s=drain_s,
                say=say,
                launch_id=launch_id,
                link_grace_s=link_grace_s,
            )
            self._doors.publish((), ())  # whoever comes is told to the table
            self.background: Background = self._doors.background
            self.table: InstanceTable = self._doors.table
        else:
            self.background, self.table = _alone(link_grace_s)

    async def serve(self, members: Membership | None = None, cluster_key: str = "") -> None:
        """Until cancelled. The web framework loads in a thread, while others in this loop go on.

        Args:
            members, cluster_key: of the head of a cluster, which needs an admin listener.

        Raises:
            EpdError: a worker does not start.
        """
        if self._doors is None or self._admin is not None:
            await asyncio.to_thread(importlib.import_module, "proxy.http.app")
        from proxy.errors import most_telling

        assert members is None or self._admin is not None, "members call on the admin listener"
        answers = self._here() if self._doors is None else self._by_processes(self._doors)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(answers.serving)
                if self._admin is not None:
                    group.create_task(
                        serve_admin(
                            self._admin,
                            self.table,
                            answers.metrics,
                            grace_s=self._grace_s,
                            circuits=answers.circuits,
                            members=members,
                            cluster_key=cluster_key,
                        )
                    )
        except BaseExceptionGroup as failed:
            raise most_telling(failed) from None
        finally:
            await self.background.stop()
            self._stack.close()

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

    def _by_processes(self, doors: FrontDoors) -> _Answers:
        self._serves(doors)
        return _Answers(_until_ended(doors), doors.metrics)


@dataclass(frozen=True)
class _Answers:
    """Who serves the clients' port, and what the admin listener tells of it. `circuits`: where one process has all."""

    serving: Coroutine[None, None, None]
    metrics: Callable[[], Awaitable[bytes]]
    circuits: Circuits | None = None


async def _until_ended(doors: FrontDoors) -> None:
    """Until cancelled; then they end, and are told of the instances until they have."""
    serving = asyncio.create_task(doors.serve())
    try:
        await asyncio.shield(serving)
    finally:
        await doors.end()
        serving.cancel()
        await asyncio.wait([serving])


def _alone(link_grace_s: float) -> tuple[Background, InstanceTable]:
    """Of a proxy in this process."""
    from proxy.background import Background
    from proxy.registry.table import InstanceTable

    return Background(), InstanceTable(link_grace_s=link_grace_s)
