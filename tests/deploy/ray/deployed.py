"""Twelve simulated stages over three nodes of a Ray cluster, as their operator and their clients see them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil

from bench.change.deployment import Deployment
from bench.change.loads import Judged, judged, simulated_flows
from bench.clients.process import SenderProcess
from bench.served import Served
from tests.deploy.ray.nodes import RayNodes
from tests.deploy.ray.on_ray import NAME, commanded_on_ray, kind_of, on_ray
from tests.e2e.serving import Endpoint
from tests.waiting import PATIENCE_S, wait_for

PER_S = 20.0
SECONDS = 240.0
"""Of load at most: it ends with what it is there for."""

LIMIT_S = 60.0


@dataclass
class Deployed:
    """`lives`, `nodes`: incarnation and node by instance."""

    ray: RayNodes
    name: str
    launch: Served
    deployment: Deployment

    @property
    def lives(self) -> dict[str, str]:
        return {one["id"]: one["incarnation"] for one in self.deployment.status()["instances"]}

    @property
    def nodes(self) -> dict[str, str]:
        return {one["id"]: one["node"] for one in self.deployment.status()["instances"]}

    def whole(self) -> None:
        self.deployment.whole(PATIENCE_S)

    def command(self, *words: str) -> str:
        """What `epd-serve …` prints, in a process that has nothing but the cluster's address and token."""
        argv = [sys.executable, "-m", "deploy.cli", *words, "--ray", "--name", self.name]
        done = subprocess.run(
            argv, cwd="/", env=self.ray.environment, capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert done.returncode == 0, (words, done.stdout[-2000:], done.stderr[-2000:])
        return done.stdout

    def changed(self, *words: str) -> dict[str, Any]:
        """The change that such a command has made."""
        change: dict[str, Any] = json.loads(self.command(*words, "--json"))["change"]
        assert change["state"] == "done", change
        return change

    def processes(self) -> list[int]:
        """All of ours on the nodes: node processes and what is below them, stages among it."""
        parts = self.deployment.status()["parts"]
        roots = [one["pid"] for name, one in parts.items() if kind_of(name) == "node process"]
        assert roots, parts
        return [one.pid for root in roots for one in (psutil.Process(root), *psutil.Process(root).children(True))]


@contextmanager
def deployed_on(ray: RayNodes, layout: str, name: str = NAME, *flags: str) -> Iterator[Deployed]:
    with on_ray(ray, layout, ["--name", name, *flags]) as launch, commanded_on_ray(ray, name) as deployment:
        yield Deployed(ray, name, launch, deployment)


@contextmanager
def load(deployed: Deployed) -> Iterator[Judged]:
    """Texts and images, whole answers and streams; what became of them is there after the context."""
    found = Judged()
    with SenderProcess() as sender:
        flows = simulated_flows(deployed.launch.model, SECONDS, PER_S)
        before = ended(deployed)
        sender.start(deployed.launch.url, *flows, limit_s=LIMIT_S, decode=True)
        wait_for(lambda: ended(deployed) >= before + PER_S, "load")
        yield found
        sender.enough()
        run = sender.finish()
    vars(found).update(vars(judged(run.rows)))


def ended(deployed: Deployed) -> float:
    """How many requests its front doors have answered."""
    return Endpoint(deployed.launch.url).metric("epd_proxy_requests_total")
