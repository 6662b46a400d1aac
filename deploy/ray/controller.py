"""The Controller actor: the one controller of a deployment, on whichever node, started again by Ray when it dies.

What a life of a controller on several hosts is, `deploy/cluster/controller.py` says; here it gets Ray's nodes
(`hosts.py`), devices that Ray reserves (`leases.py`), and operators, who ask it over TLS where `address` says. Stages
and front doors go on without it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import ray
from ray.util import get_node_ip_address
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from deploy.cluster.controller import prepared
from deploy.cluster.nodes import Cluster
from deploy.cluster.notes import NodeNotes
from deploy.host.event_loop import first
from deploy.host.ports import free_ports, listen
from deploy.launch.life import ENDING, KILLED, READY
from deploy.node.routes import serve_tls
from deploy.options.addresses import port_range
from deploy.options.config import DeployConfig
from deploy.ray.cluster import nodes_alive
from deploy.ray.hosts import RayHosts, end_all, kind_of
from deploy.ray.leases import PlacementGroups, release_all
from deploy.ray.news import News
from deploy.runtime.secrets import NodeSecrets
from epd_serve import __version__
from epd_serve.errors import ConfigError, EpdError
from store.addresses import authority

if TYPE_CHECKING:
    from fastapi import FastAPI

SIGNALS = "signals.json"
"""The note of what operators have sent."""

CRASHED, LOST = 70, 1
CRASH_S = 1.0
"""From a defect to the end of the process: Ray starts the next one at once."""

HEARD_S = 3.0

logger = logging.getLogger(__name__)


class ControllerActor:
    """Args:
    config: a `DeployConfig` in JSON: no secret is in it. What it names of files is on every node, but for the
        clients' keys, which are on the node `begun_on`.
    """

    def __init__(self, config: str, begun_on: str) -> None:
        self._config = msgspec.json.decode(config, type=DeployConfig)
        self._begun_on = begun_on
        self._news = News()
        self._signals: list[int] = []
        self._notes: NodeNotes | None = None
        loop = asyncio.get_running_loop()
        self._app: asyncio.Future[FastAPI] = loop.create_future()
        self._code: asyncio.Future[int] = loop.create_future()
        self._address: asyncio.Future[str] = loop.create_future()
        self._take: Callable[[int], None] = lambda number: None
        self._living = asyncio.create_task(self._live(), name="controller")

    async def about(self) -> tuple[str, str, str]:
        """`HOST:PORT` where operators ask it, the folder of what they show, and the version of this program."""
        return await asyncio.shield(self._address), self._config.node_secrets, __version__

    # --- what operators ask ---------------------------------------------------------------------------------------

    async def _serve(self, members: NodeSecrets) -> None:
        """Until cancelled."""
        host = get_node_ip_address()
        (port,) = free_ports(1, host, port_range(self._config.node_ports))
        with listen(host, port) as listening:
            self._address.set_result(authority(host, port))
            own = Starlette(
                routes=[
                    Route("/news", self._tell_news),
                    Route("/signals", self._hear_signal, methods=["POST"]),
                    Mount("/", self._answer),
                ]
            )
            await serve_tls(listening.dup(), members, own)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As a launch of one machine, once it controls something."""
        await (await asyncio.shield(self._app))(scope, receive, send)

    async def _tell_news(self, request: Request) -> Response:
        """As `News.after`."""
        asked = request.query_params
        told = self._news.after(asked["life"], int(asked["after"]))
        return Response(msgspec.json.encode(told), media_type="application/json")

    async def _hear_signal(self, request: Request) -> Response:
        """As to the process of a launch, one after the other. When all is over anyway none has to be kept."""
        for number in msgspec.json.decode(await request.body(), type=list[int]):
            self._hear(number)
        if self._notes is not None and not self._code.done():
            self._notes.write(SIGNALS, msgspec.json.encode(self._signals))
            await self._notes.kept()
        return Response()

    def _hear(self, number: int) -> None:
        self._signals.append(number)
        if number == signal.SIGKILL:  # the life before this one did not answer
            self._end(KILLED)
        self._take(number)

    # --- what its life asks of it: `deploy.launch.life.Process` -----------------------------------------------------

    def heed(self, take: Callable[[int], None]) -> None:
        self._take = take
        for number in self._signals:
            take(number)

    async def over(self, code: int) -> None:
        self._end(code)

    def _end(self, code: int) -> None:
        """The first word counts."""
        if not self._code.done():
            self._code.set_result(code)

    # --- its life -------------------------------------------------------------------------------------------------

    async def _live(self) -> None:
        """Until the deployment is over, and nothing of it is left."""
        try:
            members = NodeSecrets(self._config.node_secrets, "--node-secrets")
            self._serving = asyncio.create_task(self._serve(members), name="operators")
            code = await first(self._code, self._control(members), asyncio.shield(self._serving))
            await self._clear()
            self._news.add("ended", code)
            await self._news.taken(HEARD_S)
            await asyncio.to_thread(ray.kill, ray.get_runtime_context().current_actor, no_restart=True)
            await asyncio.sleep(HEARD_S)
        except BaseException:  # not by unwinding: Ray would take an actor for well that does nothing any more
            logger.exception("the controller has failed")
        await asyncio.sleep(CRASH_S)
        os._exit(CRASHED)

    async def _clear(self) -> None:
        """Nothing of it is left on the cluster but this actor."""
        await end_all(self._config.name)
        await release_all(self._config.name)

    async def _control(self, members: NodeSecrets) -> int:
        """Until the deployment is over. Returns its exit code."""
        again = ray.get_runtime_context().was_current_actor_reconstructed
        if not again:
            await self._clear()  # somebody may have killed one of this name
        config, kind = self._config, kind_of(self._config, await asyncio.to_thread(nodes_alive))
        logs = f"epd-serve logs --ray --name {config.name}"
        hosts, reserver = RayHosts(config, kind), PlacementGroups(config.name, kind)
        cluster = Cluster(config, kind, hosts, members, reserver, True, self._begun_on, logs, self._app.set_result)
        notes, there = await cluster.noted()
        self._notes = notes
        if again and notes.empty:  # it had not begun, or nothing is left of it
            self._news.add("line", f"nothing is left of deployment {config.name}, nor of what was wanted")
            return LOST
        if (ending := notes.read(ENDING)) is not None:  # what is left has had its time
            return int(ending)
        for number in msgspec.json.decode(notes.read(SIGNALS) or b"[]", type=list[int]):
            self._hear(number)
        if not (was_ready := notes.read(READY) is not None):
            self.heed(lambda number: self._end(0))  # what has hardly begun ends at once
        try:
            life = await prepared(cluster, notes, there, self, self._news, lambda text: self._news.add("ready", text))
        except EpdError as error:
            if was_ready:
                raise
            self._news.add("refused", str(error), error.param, isinstance(error, ConfigError))
            return LOST
        return await life.live()
