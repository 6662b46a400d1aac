"""A cluster of a test: a Deployment of node pods whose containers are real node processes of this machine.

Here are what the controller of Deployments does (replicas, rolling updates, which pods go first), and what kubelet
does: it starts containers and starts them again, probes them, and ends them with preStop, SIGTERM, SIGKILL. Each pod
has an address of its own of this machine's loopback, its clients' port there.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import datetime
import itertools
import os
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from deploy.host import processes
from deploy.host.environment import module_environment
from epd_serve import __version__
from tests.deploy.kubernetes.api_server import FakeApiServer, Json, recorded
from tests.waiting import PATIENCE_S, until

OF_VERSION = """
import runpy, sys
import epd_serve
_, epd_serve.__version__, module, *words = sys.argv
sys.argv = [module, *words]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
"""Runs a module of ours, and says that it is of another version."""

GRACE_S = 60.0
LOOK_S = 0.05
COST = "controller.kubernetes.io/pod-deletion-cost"


@dataclass(eq=False)
class FakePod:
    """A pod, and its container's process. `clients`: port of its front door."""

    cluster: FakeCluster
    name: str
    ip: str
    revision: int
    version: str
    process: subprocess.Popen[bytes] | None = None
    restarts: int = 0
    ready: bool = False
    task: asyncio.Task[None] | None = None
    leaving: asyncio.Event = field(default_factory=asyncio.Event)
    uid: str = field(default_factory=lambda: str(uuid.uuid4()))

    @property
    def folder(self) -> Path:
        return self.cluster.folder / self.uid[:4]

    @property
    def id(self) -> str:
        """Of the host that it is."""
        return f"{self.name}.{self.uid[:8]}"

    @property
    def cost(self) -> int:
        return int(self.cluster.api.annotations(self.name).get(COST, "0"))

    def show(self, step: str) -> None:
        """It is as pods were in this step of a life that was recorded."""
        pod = copy.deepcopy(self.cluster.lives[step])
        meta, status, spec = pod["metadata"], pod["status"], pod["spec"]
        before = self.cluster.api.pods.get(self.name, {"metadata": {"annotations": {}}})["metadata"]
        meta["name"], meta["uid"] = self.name, self.uid
        meta["labels"] |= {"app.kubernetes.io/instance": "epd", "app.kubernetes.io/component": "node"}
        meta["annotations"] = {**self.cluster.annotations, **before["annotations"]}
        if self.leaving.is_set():
            meta["deletionTimestamp"] = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        spec["containers"][0]["ports"] = [{"name": "node", "containerPort": self.cluster.port, "protocol": "TCP"}]
        if "podIP" in status:
            status["podIP"], status["podIPs"] = self.ip, [{"ip": self.ip}]
        for one in status.get("containerStatuses", ()):
            one["restartCount"] = self.restarts
        self.cluster.api.put(pod)

    async def live(self) -> None:
        """As kubelet has it, from its start until it is gone."""
        self.show("pending")
        await asyncio.sleep(0)
        self.show("scheduled")
        leaving = asyncio.create_task(self.leaving.wait())
        try:
            while not self.leaving.is_set():
                self._begin()
                self.show("running")
                probing = asyncio.create_task(self._probe())
                ended = asyncio.create_task(self._ended())
                await asyncio.wait([ended, leaving], return_when=asyncio.FIRST_COMPLETED)
                if not self.leaving.is_set():
                    probing.cancel()
                    ended.cancel()
                    self.restarts, self.ready = self.restarts + 1, False
                    self.show("terminated")
                    await asyncio.sleep(self.cluster.backoff_s)
                    continue
                await self._end(ended)
                probing.cancel()
                ended.cancel()
        finally:
            leaving.cancel()
            self.kill()
        self.cluster.api.remove(self.name)

    def _begin(self) -> None:
        """Its container."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        listening = socket.create_server((self.ip, self.cluster.clients), backlog=512)
        words = ["node", "--listen", f"{self.ip}:{self.cluster.port}", "--secrets", str(self.cluster.secrets)]
        words += ["--run-root", str(self.folder), "--clients", str(listening.fileno())]
        with (self.cluster.folder / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", OF_VERSION, self.version, "deploy.cli", *words],
                env=module_environment(),
                stdout=log,
                stderr=log,
                pass_fds=[listening.fileno()],
                start_new_session=True,
            )
        listening.close()

    async def _ended(self) -> None:
        assert self.process is not None
        while self.process.poll() is None:
            await asyncio.sleep(LOOK_S)

    async def _probe(self) -> None:
        async with httpx.AsyncClient(verify=self.cluster.nobody, trust_env=False, timeout=5.0) as http:
            while True:
                ready = False
                with contextlib.suppress(httpx.TransportError):
                    answer = await http.get(f"https://{self.ip}:{self.cluster.port}/ready")
                    ready = answer.status_code == 200
                if ready != self.ready:
                    self.ready = ready
                    self.show("leaving" if self.leaving.is_set() else "ready" if ready else "running")
                await asyncio.sleep(LOOK_S)

    async def _end(self, ended: asyncio.Task[None]) -> None:
        """preStop, SIGTERM, and in the end SIGKILL, as deletion says."""
        assert self.process is not None
        self.show("leaving")
        words = ["node", "--await-empty", "--within-s", f"{self.cluster.await_empty_s}"]
        words += ["--listen", f"{self.ip}:{self.cluster.port}"]
        before = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "deploy.cli", *words, "--secrets", str(self.cluster.secrets), env=module_environment()
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                self.cluster.emptied.append(await before.wait() == 0)
                self.process.terminate()
                await ended

    def kill(self) -> None:
        """Its container, at once: all of its processes."""
        if self.process is not None and self.process.poll() is None:
            below = _below(self.process.pid)
            self.process.kill()
            self.process.wait()
            for pid in below:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _below(pid: int) -> list[int]:
    parents = {one.pid: one.parent for one in processes.running()}
    every = [pid]
    for one in every:
        every += [child for child, parent in parents.items() if parent == one]
    return every[1:]


class FakeCluster:
    """Args:
        secrets: folder of what makes its nodes members of a deployment.
        devices: that each pod lends. annotations: of the pods, beside that.

    Attributes:
        api: its API server. live: pods by name. emptied: whether each that has left was empty when its preStop ended.
        version: of EPD-Serve in the image of pods that come. surge: an update has all new pods beside the old ones.
        await_empty_s: as of the rendered preStop.
    """

    def __init__(self, folder: Path, secrets_: Path, devices: int = 4, **annotations: str) -> None:
        self.folder, self.secrets = folder, secrets_
        self.api = FakeApiServer(folder)
        self.annotations = {"epd-serve/devices": str(devices), **annotations}
        self.lives: Json = recorded("life")
        self.live: dict[str, FakePod] = {}
        self.emptied: list[bool] = []
        self.revision, self.version, self.surge = 1, __version__, False
        self.await_empty_s = 30
        self.backoff_s = 0.2
        self.net = f"127.{os.getpid() % 200 + 20}.{secrets.randbelow(250)}"
        self.port, self.clients = 9443, 8000
        self.nobody = ssl.create_default_context()
        self.nobody.check_hostname, self.nobody.verify_mode = False, ssl.CERT_NONE
        self._numbers = itertools.count(1)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[FakeCluster]:
        await self.api.start()
        control = asyncio.create_task(self._control())
        try:
            yield self
            assert not control.done(), control.exception()
        finally:
            control.cancel()
            tasks = [pod.task for pod in self.live.values() if pod.task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.wait([control, *tasks])
            await self.api.stop()

    def delete(self, name: str) -> None:
        """As `kubectl delete pod`, or an eviction."""
        self.live[name].leaving.set()

    def roll(self, version: str = "") -> None:
        """Another template, for example the image of another version: all pods are replaced."""
        self.revision, self.version = self.revision + 1, version or self.version

    def undo(self) -> None:
        """The template before."""
        self.revision, self.version = self.revision - 1, __version__

    async def _control(self) -> None:
        """What the controller of Deployments does, with maxSurge 0 and maxUnavailable 1, or 100% and 0."""
        while True:
            for pod in [one for one in self.live.values() if one.task is not None and one.task.done()]:
                pod.task.result()  # type: ignore[union-attr]
                del self.live[pod.name]
            there = [one for one in self.live.values() if not one.leaving.is_set()]
            old = [one for one in there if one.revision != self.revision]
            new = [one for one in there if one.revision == self.revision]
            for _ in range(self.api.replicas - len(new if self.surge else there)):
                self._create()
            if self.surge and old:
                spare = len(there) - self.api.replicas - sum(not one.ready for one in new)
                for one in sorted(old, key=lambda one: one.ready)[: max(0, spare)]:
                    one.leaving.set()
            elif len(there) > self.api.replicas:
                first = sorted(there, key=lambda one: (one.ready, one.cost, -int(one.ip.rpartition(".")[2])))
                for one in first[: len(there) - self.api.replicas]:
                    one.leaving.set()
            elif old and len(there) == self.api.replicas and all(one.ready for one in there):
                old[0].leaving.set()
            await asyncio.sleep(LOOK_S)

    def _create(self) -> None:
        number = next(self._numbers)
        name = f"epd-node-7d9c{self.revision}-{number:05d}"
        one = FakePod(self, name, f"{self.net}.{number}", self.revision, self.version)
        self.live[one.name] = one
        one.task = asyncio.create_task(one.live(), name=one.name)

    async def ready(self, count: int) -> None:
        await until(lambda: [one.ready for one in self.live.values()] == [True] * count, f"{count} pods to be ready")


@dataclass
class Load:
    """Clients of the Service: each asks a pod that is Ready, again and again, until the context ends.

    Attributes:
        answered: how often. failed: pod and what went wrong, of those that were not answered.
    """

    cluster: FakeCluster
    clients: int = 4
    answered: int = 0
    failed: list[tuple[str, Any]] = field(default_factory=list)
    by: Counter[str] = field(default_factory=Counter)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Load]:
        tasks = [asyncio.create_task(self._ask(number)) for number in range(self.clients)]
        try:
            yield self
            assert not any(task.done() for task in tasks), tasks
        finally:
            self._over = True
            await asyncio.wait(tasks, timeout=PATIENCE_S)

    _over: bool = False

    async def _ask(self, number: int) -> None:
        body = {"model": "epd-demo", "messages": [{"role": "user", "content": f"hi {number}"}], "max_tokens": 20}
        async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S) as http:
            for turn in itertools.count(number):
                there = [one for one in self.cluster.live.values() if one.ready and not one.leaving.is_set()]
                if self._over:
                    return
                if not there:
                    await asyncio.sleep(LOOK_S)
                    continue
                pod = there[turn % len(there)]
                try:
                    answer = await http.post(f"http://{pod.ip}:{self.cluster.clients}/v1/chat/completions", json=body)
                except httpx.TransportError as error:
                    self.failed.append((pod.name, repr(error)))
                    continue
                if answer.status_code == 200:
                    self.answered += 1
                    self.by[pod.name] += 1
                else:
                    self.failed.append((pod.name, answer.text))

    async def more(self, count: int = 20) -> None:
        """Wait until so many more have been answered."""
        before = self.answered
        await until(lambda: self.answered >= before + count, "answers")
