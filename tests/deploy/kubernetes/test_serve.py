"""The real controller and real node processes, simulated stages on them, in a cluster that does what clusters do: what
is asked meanwhile is answered, but where the connection itself is killed."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from deploy.host.environment import module_environment
from deploy.host.launches import ADMIN_SOCKET, NoLaunchError, choose_launch
from deploy.kubernetes.scale import LEFT_OUT
from deploy.options.config import DeployConfig
from epd_serve import __version__
from tests.deploy.kubernetes.cluster import FakeCluster, Load
from tests.deploy.launch.test_sim_launch import profile_file
from tests.deploy.node_secrets import node_secrets
from tests.waiting import PATIENCE_S, until

SERVE = """
import sys, msgspec
from pathlib import Path
import epd_serve
epd_serve.__version__ = sys.argv[3]
from deploy.kubernetes import serve, scale
from deploy.options.config import DeployConfig
config, account = Path(sys.argv[1]), Path(sys.argv[2])
serve.SETTLE_S, scale.UNUSED_S = 120.0, 4.0
sys.exit(serve.serve_on_kubernetes(msgspec.json.decode(config.read_bytes(), type=DeployConfig), account))
"""


class World:
    """Attributes: cluster. controller: its process."""

    controller: subprocess.Popen[bytes]

    def __init__(self, folder: Path, layout: str, devices: int = 4, allowed: str = "", **settings: Any) -> None:
        self.folder = folder
        secrets = node_secrets(folder / "secrets")
        annotations = {"epd-serve/nodes": allowed} if allowed else {}
        self.cluster = FakeCluster(folder, secrets, devices, **annotations)
        self.config = DeployConfig(
            layout=layout,
            engine="sim",
            sim_profile=profile_file(folder),
            arena_mib=32,
            kv_staging_mib=4,
            run_root=str(folder / "c"),
            stage_template="never",
            host="0.0.0.0",
            port=self.cluster.clients,
            drain_s=10.0,
            lame_duck_s=0.0,
            runtime="kubernetes",
            node_secrets=str(secrets),
            **settings,
        )
        (folder / "config.json").write_bytes(msgspec.json.encode(self.config))

    def begin(self, version: str = __version__) -> None:
        """A controller's process, as its pod begins it, of this version."""
        place = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(self.cluster.api.port)}
        words = [sys.executable, "-c", SERVE, str(self.folder / "config.json"), str(self.cluster.api.account)]
        words.append(version)
        with (self.folder / "controller.log").open("ab") as log:
            self.controller = subprocess.Popen(words, env=module_environment() | place, stdout=log, stderr=log)

    def starts_in(self, seconds: float) -> None:
        """So long a decode instance loads its model that starts from now on."""
        file = Path(self.config.sim_profile)
        file.write_text(json.dumps({**json.loads(file.read_text()), "start_s": {"D": seconds}}))

    @property
    def log(self) -> str:
        return (self.folder / "controller.log").read_text()

    def ends(self, number: int) -> int:
        """Its exit code."""
        self.controller.send_signal(number)
        return self.controller.wait(PATIENCE_S)

    async def asks(self, method: str, path: str, **body: Any) -> dict[str, Any]:
        """As `epd-serve` does in the controller's pod. Nothing while it does not answer."""
        try:
            run = choose_launch(None, Path(self.config.run_root), keeps=ADMIN_SOCKET)
            transport = httpx.AsyncHTTPTransport(uds=str(run.path / ADMIN_SOCKET))
            async with httpx.AsyncClient(transport=transport, base_url="http://deployment", timeout=PATIENCE_S) as http:
                answer = await http.request(method, path, json=body or None)
        except (NoLaunchError, httpx.TransportError):
            assert self.controller.poll() is None, self.log
            return {}
        assert answer.is_success or answer.status_code == 409, answer.text
        told: dict[str, Any] = answer.json()
        return told

    async def whole(self, layout: str = "") -> dict[str, dict[str, Any]]:
        """Its instances, by id, once nothing is to be done."""

        async def steady() -> dict[str, dict[str, Any]]:
            status = await self.asks("GET", "/deployment")
            instances = {one["id"]: one for one in status.get("instances", ())}
            up = all(one["phase"] == "up" for one in instances.values())
            ours = status.get("state") == "steady" and layout in ("", status.get("layout"))
            return instances if ours and up and instances else {}

        found: dict[str, dict[str, Any]] = await until(steady, "all up")
        return found


@contextlib.asynccontextmanager
async def world(folder: Path, layout: str, pods: int, **settings: Any) -> AsyncIterator[tuple[World, Load]]:
    """Ready, and asked all the time."""
    w = World(folder, layout, **settings)
    w.cluster.api.replicas = pods
    async with w.cluster.running():
        w.begin()
        try:
            await w.whole()
            await w.cluster.ready(pods)
            load = Load(w.cluster)
            async with load.running():
                await load.more()
                yield w, load
                await load.more()
        finally:
            w.controller.kill()
            w.controller.wait()


def nodes(instances: dict[str, dict[str, Any]]) -> set[str]:
    return {one["node"] for one in instances.values()}


async def test_pods_are_ready_once_an_instance_of_each_role_answers(tmp_path: Path) -> None:
    w = World(tmp_path, "E-P-D", placement="spread")
    w.starts_in(10.0)
    w.cluster.api.replicas = 2
    async with w.cluster.running():
        w.begin()
        try:
            await w.cluster.ready(2)
            instances = (await w.asks("GET", "/deployment"))["instances"]
            assert {one["id"]: one["phase"] for one in instances} == {"E0": "up", "P0": "up", "D0": "up"}
        finally:
            w.controller.kill()
            w.controller.wait()


async def test_a_pod_whose_processes_are_killed_serves_again_and_no_other_notices(tmp_path: Path) -> None:
    async with world(tmp_path, "2E-2P-2D", 2, placement="spread") as (w, load):
        before = await w.whole()
        victim, other = w.cluster.live.values()
        assert nodes(before) == {victim.id, other.id}
        victim.kill()
        await until(lambda: victim.restarts == 1 and victim.ready, "its container to serve again")
        after = await w.whole()
        assert nodes(after) == nodes(before)
        stayed = [name for name, one in before.items() if one["node"] == other.id]
        assert all(after[name]["incarnation"] == before[name]["incarnation"] for name in stayed)
        assert {name for name, _ in load.failed} <= {victim.name}, load.failed


async def test_what_is_on_a_pod_that_is_drained_moves_first(tmp_path: Path) -> None:
    async with world(tmp_path, "E-P-2D", 2, placement="spread") as (w, load):
        before = await w.whole()
        victim = next(iter(w.cluster.live.values()))
        assert victim.id in nodes(before)
        w.cluster.delete(victim.name)
        await until(lambda: victim.name not in w.cluster.live, "it to be gone")
        await w.cluster.ready(2)
        after = await w.whole()
        assert victim.id not in nodes(after) and len(after) == len(before)
        assert w.cluster.emptied == [True] and load.failed == []


@pytest.mark.slow
async def test_a_rolling_update_and_pods_that_come_and_go_cost_no_answer(tmp_path: Path) -> None:
    async with world(tmp_path, "E-P-2D", 2, placement="spread") as (w, load):
        old = set(w.cluster.live)
        w.cluster.roll()
        await until(lambda: not old & w.cluster.live.keys(), "all of them to be replaced")
        await w.cluster.ready(2)
        await w.whole()
        w.cluster.api.scaled(3)
        await w.cluster.ready(3)
        w.cluster.api.scaled(1)
        await until(lambda: len(w.cluster.live) == 1, "two to go")
        assert nodes(await w.whole()) == {one.id for one in w.cluster.live.values()}
        assert w.cluster.emptied == [True] * 4 and load.failed == []


@pytest.mark.slow
async def test_an_update_to_another_version_ends_with_it_and_no_client_notices(tmp_path: Path) -> None:
    async with world(tmp_path, "E-P-2D", 2, placement="spread") as (w, load):
        w.cluster.surge, w.cluster.await_empty_s = True, 5
        w.starts_in(5.0)
        old = set(w.cluster.live)
        w.cluster.roll("9.9.9")

        def told() -> list[str]:
            return [w.cluster.api.annotations(name).get(LEFT_OUT, "") for name in w.cluster.live.keys() - old]

        await until(lambda: [f"EPD-Serve 9.9.9, its controller {__version__}" in why for why in told()] == [True] * 2)
        assert {name for name, pod in w.cluster.live.items() if pod.ready} == old, "nobody is sent to the new ones"
        await load.more()
        w.cluster.undo()
        await until(lambda: w.cluster.live.keys() == old, "the way back")
        w.cluster.roll("9.9.9")
        assert w.ends(signal.SIGTERM) == 0
        w.begin("9.9.9")
        await until(lambda: not old & w.cluster.live.keys(), "the old ones to go")
        await w.cluster.ready(2)
        assert nodes(await w.whole("E-P-2D")) == {one.id for one in w.cluster.live.values()}
        await load.more()
        assert load.failed == []


@pytest.mark.slow
async def test_where_no_pod_is_left_of_one_version_the_other_serves(tmp_path: Path) -> None:
    async with world(tmp_path, "E-P-D", 1) as (w, load):
        (old,) = w.cluster.live.values()
        assert w.ends(signal.SIGTERM) == 0
        w.begin("9.9.9")
        await until(lambda: "E-P-D takes 1 pods, and 0 run EPD-Serve 9.9.9" in w.log, "it to leave the old one alone")
        await load.more()
        w.cluster.await_empty_s = 1
        w.cluster.roll("9.9.9")
        await until(lambda: old.name not in w.cluster.live, "the old one to go")
        await w.cluster.ready(1)
        assert nodes(await w.whole("E-P-D")) == {one.id for one in w.cluster.live.values()}
        assert load.failed == []


async def test_what_an_operator_wants_has_the_cluster_start_pods_and_give_them_up(tmp_path: Path) -> None:
    async with world(tmp_path, "E-P-D", 1, devices=3, allowed="1-3") as (w, load):
        refused = await w.asks("POST", "/deployment/scale", counts={"D": 3})
        assert refused["error"]["code"] == "no_devices"
        await w.cluster.ready(2)

        async def accepted() -> bool:
            return "error" not in await w.asks("POST", "/deployment/scale", counts={"D": 3})

        await until(accepted, "devices of the second pod")
        assert len(await w.whole("E-P-3D")) == 5 and w.cluster.api.replicas == 2
        await w.asks("POST", "/deployment/layout", layout="2E-P-D")
        await w.whole("2E-P-D")
        await w.asks("POST", "/deployment/layout", layout="E-P-D")
        await w.whole("E-P-D")
        await until(lambda: w.cluster.api.replicas == 1 == len(w.cluster.live), "what is unused to go")
        assert load.failed == []


async def test_a_controller_that_is_lost_is_followed_and_one_that_is_told_to_end_leaves_all_as_it_is(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, "E-P-2D", 2, placement="spread") as (w, load):
        before = await w.whole()
        assert w.ends(signal.SIGKILL) == -signal.SIGKILL
        await load.more()
        w.begin()
        same = {name: one["incarnation"] for name, one in before.items()}
        assert {name: one["incarnation"] for name, one in (await w.whole()).items()} == same
        await w.cluster.api.stop()
        await w.asks("POST", "/deployment/scale", counts={"D": 3})
        await w.whole("E-P-3D")
        await w.cluster.api.start()
        assert w.ends(signal.SIGTERM) == 0
        await load.more()
        w.begin()
        assert {*same.items()} < {(name, one["incarnation"]) for name, one in (await w.whole("E-P-3D")).items()}
        assert load.failed == []


async def test_what_no_pods_can_have_ends_with_the_reason(tmp_path: Path) -> None:
    w = World(tmp_path, "E-P-9D")
    w.cluster.api.replicas = 1
    async with w.cluster.running():
        w.begin()
        assert await until(lambda: w.controller.poll() is not None and w.controller.returncode, "its end") == 1
        assert "E-P-9D takes 3 pods, and 1 run" in w.log
