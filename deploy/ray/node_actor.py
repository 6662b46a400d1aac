"""The Node actor: what Ray keeps alive on each node of a deployment, and through which its controller reaches the node.

It finds or starts the node process, which is none of Ray's and outlives it: what a process is under Ray (its
environment, its niceness, its place in the order of those that are killed where memory is short) is not for stages.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deploy.front.key_watch import read_key_text
from deploy.host.logs import read_log
from deploy.host.ports import listen
from deploy.host.processes import environment_of, running
from deploy.node.facts import NodeFacts, read_facts
from deploy.node.start import NodeRun, NodeSetup, end_node, find_node, start_node
from deploy.options.config import DeployConfig
from deploy.ray.cluster import NAMESPACE, Actor, Headers, HttpAnswer, asked_of, here, node_name
from deploy.runtime.node_api import NODE_SOCKET
from deploy.runtime.node_client import ANSWER_S, unix_transport
from epd_serve.errors import EpdError


class NodeActor:
    """On its node, until the deployment ends. Every call may be repeated.

    Args:
        run_root: where the node process keeps its run directory, or "".
    """

    def __init__(self, deployment: str, run_root: str) -> None:
        self._deployment = deployment
        self._root = Path(run_root) if run_root else None
        self._node = here()
        self._one_at_a_time = asyncio.Lock()
        self._run: NodeRun | None = None
        self._http: tuple[Path, httpx.AsyncClient] | None = None
        self._listening: socket.socket | None = None

    async def facts(self, config: DeployConfig, virtual_devices: int) -> NodeFacts:
        """What the node is, asked in a process that is none of Ray's. Raises EpdError."""
        with _raylet() as (pid, _):
            return await asyncio.to_thread(read_facts, config, self._node, virtual_devices, _environment(pid))

    async def bind(self, host: str, port: int) -> None:
        """Takes the address of the node's front doors, before anything starts there, and keeps it: connections wait
        while a node process that was killed is followed by another one.

        Raises:
            ConfigError: somebody else has it.
        """
        async with self._one_at_a_time:
            if self._listening is None and await self._found() is None:
                self._listening = listen(host, port)

    async def ensure(self, setup: NodeSetup) -> NodeRun:
        """Has the node process run.

        Raises:
            ConfigError, EpdError: it cannot be started.
        """
        async with self._one_at_a_time:
            with _raylet() as (pid, descriptor):
                run = await self._found()
                if run is not None and run.owner_pid != pid:  # of another life of Ray here
                    await asyncio.to_thread(end_node, run)
                    run = None
                if run is None:
                    if setup.front is not None and self._listening is None:
                        self._listening = listen(setup.blueprint.config.host, setup.blueprint.config.port)
                    run = await asyncio.to_thread(
                        start_node,
                        replace(setup, owner_pid=pid),
                        owner=descriptor,
                        env=_environment(pid),
                        listening=self._listening,
                    )
                self._run = run
                return run

    async def ask(self, method: str, path: str, headers: Headers, content: bytes) -> HttpAnswer | None:
        """An HTTP request to the node's API (`deploy/runtime/node_api.py`), or None where nobody answers."""
        run = await self._found()
        if run is None:
            return None
        if self._http is None or self._http[0] != run.path:
            if self._http is not None:
                await self._http[1].aclose()
            transport = unix_transport(run.path / NODE_SOCKET)
            self._http = run.path, httpx.AsyncClient(transport=transport, base_url="http://node", timeout=ANSWER_S)
        with contextlib.suppress(httpx.TransportError):
            return await asked_of(self._http[1], method, path, headers, content)
        return None

    async def log(self, name: str, offset: int) -> tuple[bytes, int]:
        """A piece of a log from there on, and where it ends. A negative offset is one from its end."""
        run = await self._found()
        return await asyncio.to_thread(read_log, run.path / f"{name}.log", offset) if run is not None else (b"", 0)

    async def api_keys(self, path: str) -> str:
        """The text of the clients' keys. Raises ConfigError."""
        return await asyncio.to_thread(read_key_text, path)

    async def parts(self) -> dict[str, int]:
        """Pids of the processes of the deployment on this node that are no stages, by name."""
        found = {"actor": os.getpid()}
        if (run := await self._found()) is not None:
            found["node"] = run.pid
            for child in await asyncio.to_thread(lambda: [one for one in running() if one.parent == run.pid]):
                if child.name.startswith("epd "):
                    found[child.name.removeprefix("epd ")] = child.pid
        return found

    async def end(self) -> None:
        """Ends the node process and all of its own; returns when nothing is left."""
        async with self._one_at_a_time:
            self._release()
            if (run := await self._found()) is not None:
                await asyncio.to_thread(end_node, run)
            self._run = None

    async def _found(self) -> NodeRun | None:
        if self._run is None or not self._run.lives:
            self._run = await asyncio.to_thread(find_node, self._deployment, self._node, self._root)
        return self._run

    def _release(self) -> None:
        if self._listening is not None:
            self._listening.close()
            self._listening = None


def hire(deployment: str, node: str, run_root: str) -> Actor:
    """The Node actor of this node: the one there is, or another."""
    return (
        ray.remote(NodeActor)
        .options(
            name=node_name(deployment, node),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        .remote(deployment, run_root)
    )


@contextlib.contextmanager
def _raylet() -> Iterator[tuple[int, int]]:
    """The process that Ray is on this node, our parent: its pid, and a descriptor that says when it ends.

    Raises:
        EpdError: our parent is another one.
    """
    pid = os.getppid()
    descriptor = os.pidfd_open(pid)
    try:
        name = Path(f"/proc/{pid}/comm").read_text(encoding="ascii").strip()
        if name != "raylet" or os.getppid() != pid:
            raise EpdError(
                f"the parent of a Ray worker is {name}, not its raylet: runtime_env containers are not for us"
            )
        yield pid, descriptor
    finally:
        os.close(descriptor)


def _environment(raylet: int) -> dict[str, str]:
    """As whoever started Ray has it, without what Ray adds for itself and for its workers."""
    return environment_of(raylet, without=("RAY_",))
