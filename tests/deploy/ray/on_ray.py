"""A layout served on the nodes of a Ray cluster, as an operator starts and commands it, with simulated stages.

Commands go through a process of their own: taking part in a cluster is for the whole of a process, and for good.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import httpx

from bench.change.deployment import ANSWER_S, Deployment
from bench.change.kills import Victim, stages
from bench.change.loads import PROFILE
from bench.clients.process import Child
from bench.served import Served, simulated
from deploy.host.processes import stat
from tests.deploy.ray.nodes import RayNodes

LAYOUT = "2E-4P-6D"
NAME = "bench"
FLAGS = ("--workers", "2", "--drain-s", "10", "--lame-duck-s", "0")
RAY_FLAGS = ("--runtime", "ray", "--name", NAME, "--placement", "spread", "--fronts", "here")
"""Nodes of one machine share its addresses: only one of them can have the port of the front doors."""

RAYLET, NODE = "raylet", "node process"


@contextlib.contextmanager
def on_ray(ray: RayNodes, layout: str = LAYOUT, flags: Sequence[str] = ()) -> Iterator[Served]:
    """Serve until the context ends. Raises StageError: it did not become ready."""
    with simulated(layout, PROFILE, [*FLAGS, *RAY_FLAGS, *flags], ray.environment) as launch:
        yield launch


@contextlib.contextmanager
def commanded_on_ray(ray: RayNodes, name: str = NAME) -> Iterator[Deployment]:
    """The deployment of this name, whichever node its controller is on."""
    child = Child(__name__, name, ray.address, env=ray.env)
    try:
        with httpx.Client(transport=_Through(child), base_url="http://deployment", timeout=ANSWER_S) as http:
            yield Deployment(http)
    finally:
        child.stop()


class _Through(httpx.BaseTransport):
    """HTTP by way of a process that takes part in the cluster."""

    def __init__(self, child: Child) -> None:
        self._child = child

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        answer = self._child.ask((request.method, request.url.raw_path.decode(), request.read()), 2 * ANSWER_S)
        if isinstance(answer, str):
            raise httpx.ReadError(answer, request=request)
        status, content = answer
        return httpx.Response(status, content=content, request=request)


def main(pipe: Connection, name: str, address: str) -> None:
    """In that process: asks what comes, until nobody is there who asks."""
    from deploy.ray.attach import operator

    with operator(name, address) as http:
        for method, path, content in iter(pipe.recv, None):
            try:
                answer = http.request(method, path, content=content, headers={"content-type": "application/json"})
            except httpx.TransportError as error:
                pipe.send(repr(error))
            else:
                pipe.send((answer.status_code, answer.content))


def victims(ray: RayNodes, status: Mapping[str, Any]) -> list[Victim]:
    """What may be killed: stages, controller, and of each node its raylet, its actor, the process of ours that outlives
    the actor, that one's parts and front doors. Of the head, which is Ray's own single point, no raylet."""
    raylets = {one.raylet_pid for one in ray.nodes[1:]}
    parts = {name: one["pid"] for name, one in status["parts"].items() if one["pid"] is not None}
    doors = {node_of(name) for name in parts if kind_of(name) == "front door"}
    decodes = {one["node"] for one in status["instances"] if one["role"].endswith("D")}
    found = stages(status)
    for name, pid in parts.items():
        node, kind = node_of(name), kind_of(name)
        if kind == NODE:
            found.append(Victim(NODE, name, pid, front=node in doors, listens=True, decodes=node in decodes))
        elif kind:
            found.append(Victim(kind, name, pid, front=kind == "front door"))
        actor = stat(pid) if kind == "node actor" else None
        if actor is not None and actor.parent in raylets:
            found.append(Victim(RAYLET, node, actor.parent, front=node in doors, listens=True, decodes=node in decodes))
    return found


def node_of(part: str) -> str:
    return part.rpartition("/")[0]


def kind_of(part: str) -> str:
    """Of a part of a status; "" of one that is left alone."""
    name = part.rpartition("/")[2]
    if name.startswith("front."):
        return "front door"
    kinds = {"controller": "controller", "actor": "node actor", "node": NODE, "control": "control"}
    return kinds.get(name, "")
