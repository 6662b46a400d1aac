"""Several nodes of a Ray cluster on this machine: `ray.cluster_utils.Cluster` in a process of its own.

Owns Ray's processes, their token and their folder; all of it ends with the context, also where whoever measures is
killed. Every node believes to be a machine, with a raylet of its own. Ray is an optional extra, and only that process
imports it. What is deployed on the nodes is the caller's. With `autoscaled` the head runs Ray's own autoscaler, which
adds and takes away nodes by Ray's fake provider.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.clients.process import Child
from bench.served import scratch
from deploy.agent.cpu_time import Parts
from deploy.host.ports import free_ports
from deploy.host.processes import running, signal_process, stat
from epd_serve.errors import ConfigError
from tests.deploy.node_secrets import node_secrets

COUNT = 3
CPUS = 8
OBJECT_STORE_BYTES = 80 << 20
"""What Ray takes at least. Nothing of ours lies in it."""

START_S = 120.0

NOTICED = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 4,
    "health_check_timeout_ms": 5000,
}
"""A raylet that is dead refuses connections, and is known to be after 2 s; one that is slow has 20 s. By default Ray
takes 15 s for the first."""

SETTINGS = {"RAY_worker_niceness": "0", "RAY_memory_monitor_refresh_ms": "0", "RAY_USAGE_STATS_ENABLED": "0"}
"""As docs/guides/several-hosts.md asks for: what actors start keeps the priority of others, and memory that stages take
is no reason to end actors."""

NO_ACTORS = (b"ray::IDLE", b"ray::DashboardAgent", b"ray::RuntimeEnvAgent")
"""Titles of processes of Ray's beside the workers that run an actor."""


AUTOSCALER = {"RAY_enable_autoscaler_v2": "1", "RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
"""The autoscaler of `ray up`, whose nodes are processes here, and which looks every second."""


@dataclass(frozen=True)
class Autoscaled:
    """Nodes that Ray's own autoscaler adds for what waits, and takes away.

    Attributes:
        cpus: of each. most: of them. idle_s: for how long a node must have had nothing to do before it goes.
    """

    cpus: int
    most: int
    idle_s: float


@dataclass(frozen=True)
class RayNode:
    """`id`: in hex, as `ray.nodes()` has it."""

    id: str
    raylet_pid: int


class RayNodes(Child):
    """A running cluster. The first node is its head.

    Attributes:
        address: for `--ray-address`. env: what a process needs to reach it, `RAY_ADDRESS` among it.
    """

    def __init__(
        self,
        folder: Path,
        options: Mapping[str, Any],
        *,
        token: bool = True,
        settings: Mapping[str, str] = SETTINGS,
    ) -> None:
        file = folder / "token"
        file.touch(mode=0o600)
        file.write_text(secrets.token_hex(32), encoding="ascii")
        (folder / "ray").mkdir()
        mode = "token" if token else "disabled"
        auth = {"RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN_PATH": str(file), "RAY_TMPDIR": str(folder)}
        auth["EPD_NODE_SECRETS"] = str(node_secrets(folder / "node"))
        super().__init__(__name__, env={**auth, **settings})
        self._options = dict(options)
        self._nodes: list[RayNode] = []
        self.address, self.env = "", auth

    def begin(self, count: int, **head: Any) -> None:
        """The nodes that there are first. `head`: options of the first one alone. Raises StageError."""
        self.add(**head)
        for _ in range(count - 1):
            self.add()
        self.address = str(self.ask("address"))
        self.env = {**self.env, "RAY_ADDRESS": self.address}

    @property
    def environment(self) -> dict[str, str]:
        """Of a process that is to reach it."""
        return {**os.environ, **self.env}

    @property
    def nodes(self) -> tuple[RayNode, ...]:
        """Those whose raylet runs."""
        return tuple(one for one in self._nodes if (found := stat(one.raylet_pid)) is not None and not found.dead)

    def add(self, **options: Any) -> RayNode:
        """Another node, as the others but for these options of `Cluster.add_node`. Raises StageError."""
        node = self.ask({**self._options, **options}, START_S)
        assert isinstance(node, RayNode), node
        self._nodes.append(node)
        return node

    def lose(self, node: RayNode) -> None:
        """Its raylet, by SIGKILL: for Ray the node is dead."""
        signal_process(node.raylet_pid, signal.SIGKILL)

    def stop(self) -> None:
        """Ray's agents find out by themselves that their raylet has gone, after a minute."""
        left = [pid for pids in self.parts().values() for pid in pids]
        super().stop()
        for pid in left:
            signal_process(pid, signal.SIGKILL)

    def parts(self) -> Parts:
        """Ray's own processes: `gcs`, `raylet`, `actors` (workers that run one), `others` (agents, idle workers, logs).
        What actors have started and set free is none of them."""
        children: dict[int, list[int]] = {}
        for one in running():
            children.setdefault(one.parent, []).append(one.pid)
        found: dict[str, list[int]] = {part: [] for part in ("gcs", "raylet", "actors", "others")}
        below = list(children.get(self.pid, ()))
        while below:
            pid = below.pop()
            below += children.get(pid, ())
            found[_part(pid)].append(pid)
        return {part: tuple(sorted(pids)) for part, pids in found.items()}


@contextlib.contextmanager
def ray_nodes(
    count: int = COUNT, *, cpus: int = CPUS, token: bool = True, autoscaled: Autoscaled | None = None, **options: Any
) -> Iterator[RayNodes]:
    """A cluster for the time of the context.

    Args:
        count: of nodes. cpus: of each. token: whether callers have to show one. autoscaled: others that come and go.
        options: of `Cluster.add_node`, for every node: `resources`, `num_gpus`, `labels`, …

    Raises:
        ConfigError: Ray is not installed. StageError: a node did not start; with what it said.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("Ray is not installed: pip install 'epd-serve[ray]'")
    with scratch() as folder:
        settings = {**SETTINGS, **(AUTOSCALER if autoscaled else {})}
        made = RayNodes(folder, {"num_cpus": cpus, **options}, token=token, settings=settings)
        try:
            made.begin(count, **({"autoscaled": autoscaled} if autoscaled else {}))
            yield made
        finally:
            made.stop()


def main(pipe: Connection) -> None:
    """In the process: a node for each order of options, until nobody is there who asks."""
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        for order in iter(pipe.recv, None):
            if order == "address":
                pipe.send(cluster.address)
                continue
            head: dict[str, Any] = {"_system_config": NOTICED} if cluster.head_node is None else {}
            if (autoscaled := order.pop("autoscaled", None)) is not None:
                head |= _autoscaler(autoscaled)
            node = cluster.add_node(object_store_memory=OBJECT_STORE_BYTES, **order, **head)
            (raylet,) = node.all_processes["raylet"]
            pipe.send(RayNode(node.node_id, raylet.process.pid))
    finally:
        for node in (*cluster.worker_nodes, cluster.head_node):
            if node is not None:
                node.kill_all_processes(check_alive=False, allow_graceful=False)


def _autoscaler(nodes: Autoscaled) -> dict[str, Any]:
    """Options of the head. Not `AutoscalingCluster`: it ends all clusters of the machine, and lacks a file."""
    from ray.autoscaler._private.fake_multi_node.node_provider import (
        FAKE_HEAD_NODE_ID,
        FAKE_HEAD_NODE_TYPE,
        FakeMultiNodeProvider,
    )
    from ray.util import get_node_ip_address

    (port,) = free_ports(1)
    worker = {"CPU": nodes.cpus, "object_store_memory": OBJECT_STORE_BYTES}
    config = {
        "cluster_name": "epd",
        "max_workers": nodes.most,
        "idle_timeout_minutes": nodes.idle_s / 60,
        "provider": {
            "type": "external",
            "module": f"{FakeMultiNodeProvider.__module__}.{FakeMultiNodeProvider.__name__}",
            "gcs_address": f"{get_node_ip_address()}:{port}",
            "head_node_id": FAKE_HEAD_NODE_ID,
            "launch_multiple": True,
            "disable_node_updaters": True,
        },
        "head_node_type": FAKE_HEAD_NODE_TYPE,
        "available_node_types": {
            FAKE_HEAD_NODE_TYPE: {"resources": {}, "node_config": {}, "max_workers": 0},
            "worker": {"resources": worker, "node_config": {}, "min_workers": 0, "max_workers": nodes.most},
        },
        **{name: [] for name in ("setup_commands", "head_setup_commands", "worker_setup_commands")},
        "cluster_synced_files": [],
    }
    path = Path(os.environ["RAY_TMPDIR"], "autoscaler.json")
    path.write_text(json.dumps(config), encoding="utf-8")
    identity = {"RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID, "RAY_NODE_TYPE_NAME": FAKE_HEAD_NODE_TYPE}
    return {"autoscaling_config": str(path), "gcs_server_port": port, "env_vars": identity}


def _part(pid: int) -> str:
    try:
        title = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return "others"
    if title.startswith(b"ray::"):
        return "others" if title.startswith(NO_ACTORS) else "actors"
    program = Path(os.fsdecode(title.partition(b"\0")[0])).name
    return {"gcs_server": "gcs", "raylet": "raylet"}.get(program, "others")
