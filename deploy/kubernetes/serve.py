"""`epd-serve serve --runtime kubernetes`: the controller of a deployment on node pods, in a pod of its own.

What a life of it is, `deploy/cluster/controller.py` says; here it gets pods (`hosts.py`), and how many
there should be (`scale.py`). SIGTERM ends this process and nothing else: Kubernetes moves it, nodes serve on, and the
next one goes on from what they have noted. A deployment ends with its pods. Operators ask it in its pod, as a launch of
that machine: `kubectl exec deploy/NAME-controller -- epd-serve status`.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.cluster.controller import ClusterLife, prepared
from deploy.cluster.hosts import Host
from deploy.cluster.nodes import Cluster
from deploy.host.event_loop import first
from deploy.host.launches import ADMIN_SOCKET, reap_dead
from deploy.host.ports import private_socket
from deploy.host.rundir import RunDir
from deploy.kubernetes.api import ACCOUNT, ApiServer
from deploy.kubernetes.hosts import KubernetesHosts
from deploy.kubernetes.scale import PodScale, pods_wanted
from deploy.launch.life import ENDING, GRACE_S, checked_keys
from deploy.launch.screen import Screen
from deploy.options.config import DeployConfig
from deploy.plan.allot import copies
from deploy.runtime.secrets import NodeSecrets
from epd_serve import __version__
from epd_serve.errors import ConfigError, EpdError
from epd_serve.layout_parser import parse

if TYPE_CHECKING:
    from fastapi import FastAPI

SETTLE_S, LOOK_S = 30.0, 1.0
"""For so long a deployment that begins waits for pods that are still coming, though it would fit on those that are
there; and between two looks."""

ENDED = "this deployment has ended: kubectl rollout restart the Deployment of its node pods, and it begins anew"


def serve_on_kubernetes(config: DeployConfig, account: Path = ACCOUNT) -> int:
    """Controls the deployment until SIGTERM, or until it is over. Returns its exit code.

    Raises:
        ConfigError: this is no pod that may do so, or the deployment cannot be had on the pods that there are.
        EpdError: the cluster cannot be asked, or another controller has the deployment.
    """
    members = NodeSecrets(config.node_secrets, "--node-secrets")
    checked_keys(config.api_key_file)
    api = ApiServer.of_this_pod(account)

    async def lived() -> int:
        return await _Controller(config, members, api).until_left()

    return asyncio.run(lived())


class _Controller:
    """As a `deploy.launch.life.Process`. Made in its event loop."""

    def __init__(self, config: DeployConfig, members: NodeSecrets, api: ApiServer) -> None:
        self._config, self._members = config, members
        self._screen = Screen(sys.stdout, terminal=False)
        self._hosts = KubernetesHosts(api, config.name)
        self._app: asyncio.Future[FastAPI] = asyncio.get_running_loop().create_future()
        self._scale = PodScale(self._hosts, self._screen.line)

    def heed(self, take: Callable[[int], None]) -> None:
        """No signal ends the deployment."""

    async def over(self, code: int) -> None:
        """What is left are pods, which somebody else ends."""

    async def until_left(self) -> int:
        """Until a signal, which gives 0, or its end."""
        left = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, left.set)

        async def told() -> int:
            await left.wait()
            return 0

        try:
            code = await first(self._live(), told(), self._hosts.run())
            assert code is not None, "pods are followed until the end"
            return code
        finally:
            self._screen.close()

    async def _live(self) -> int:
        with self._asked_here() as commands:
            life = await self._prepared()
            self._scale.leases, self._scale.left_out = life.leases, life.nodes.left_out
            life.doors.registry.register(self._scale)
            return await life.live(self._scale.run(), self._answer(commands))

    async def _prepared(self) -> ClusterLife:
        """Once there are pods for it. Raises ConfigError: all have come, and it cannot be had on them. EpdError."""
        said, until = "", time.monotonic() + SETTLE_S
        while True:
            try:
                kind = "cpu" if self._config.engine == "sim" else self._config.device
                cluster = Cluster(
                    self._config,
                    kind,
                    self._hosts,
                    self._members,
                    logs="epd-serve logs",
                    answers=self._app.set_result,
                    version=__version__,
                )
                notes, there = await cluster.noted()
                if (code := notes.read(ENDING)) is not None:
                    raise EpdError(f"{ENDED} ({code.decode()})")
                waits = await self._lacks(there, time.monotonic() < until) if notes.empty else ""
                if not waits:
                    return await prepared(cluster, notes, there, self, self._screen, self._screen.line)
            except ConfigError as error:
                if not self._hosts.coming:
                    raise
                waits = str(error)
            if said != (said := waits):
                self._screen.line(f"waits for pods: {waits}")
            await asyncio.sleep(LOOK_S)

    async def _lacks(self, there: Sequence[Host], patient: bool) -> str:
        """What a deployment that begins waits for, if anything. Raises ConfigError: it would wait in vain. EpdError."""
        layout = self._config.layout
        self._scale.wanted = pods_wanted(self._hosts.there, (), [group.tp for group in copies(parse(layout))])
        if self._scale.wanted > len(there):
            lacks = f"{layout} takes {self._scale.wanted} pods, and {len(there)} run EPD-Serve {__version__}"
            try:
                enough = await self._scale.scale()
            except EpdError as error:
                return f"{lacks}; {error}"
            if not enough and not self._hosts.coming:
                raise ConfigError(lacks, param="layout")
            return lacks
        return f"{len(there)} run, and others are coming" if patient and self._hosts.coming else ""

    @contextlib.contextmanager
    def _asked_here(self) -> Iterator[socket.socket]:
        """Where operators in this pod ask."""
        root = Path(self._config.run_root) if self._config.run_root else None
        reap_dead(root)
        run = RunDir.create(root)
        try:
            with private_socket(run.socket(ADMIN_SOCKET)) as bound:
                yield bound
        finally:
            run.remove()

    async def _answer(self, commands: socket.socket) -> None:
        from proxy.server.uvicorn_server import serve

        await serve(await asyncio.shield(self._app), sockets=[commands], grace_s=GRACE_S)
