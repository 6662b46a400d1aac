"""A controller with node processes of this machine over TLS, simulated stages on them: begun, changed, killed, lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from deploy.cluster.controller import ClusterLife, prepared
from deploy.cluster.nodes import Cluster
from deploy.host.ports import free_ports
from deploy.options.config import DeployConfig
from deploy.ray.news import News
from deploy.runtime.secrets import NodeSecrets
from epd_serve.errors import ConfigError, EpdError
from tests.deploy.cluster.hosts import LocalHosts
from tests.deploy.launch.test_sim_launch import profile_file
from tests.deploy.node_secrets import node_secrets
from tests.waiting import PATIENCE_S, until


class Process:
    """As `deploy.launch.life.Process`."""

    def __init__(self) -> None:
        self.code: int | None = None
        self.take: Any = None

    def heed(self, take: Any) -> None:
        self.take = take

    async def over(self, code: int) -> None:
        self.code = code


class World:
    """Attributes: hosts: of the deployment. ready: what was announced."""

    def __init__(self, folder: Path, layout: str, *hosts: str, **settings: Any) -> None:
        self.folder = folder
        secrets = node_secrets(folder / "secrets")
        self.members = NodeSecrets(str(secrets), "--node-secrets")
        self.hosts = LocalHosts(folder, secrets, *hosts)
        (self.port,) = free_ports(1)
        self.ready: list[str] = []
        self.config = DeployConfig(
            layout=layout,
            engine="sim",
            sim_profile=profile_file(folder),
            arena_mib=32,
            kv_staging_mib=4,
            run_root=str(folder),
            stage_template="never",
            port=self.port,
            drain_s=5.0,
            lame_duck_s=0.0,
            runtime="ray",
            fronts="here",
            node_secrets=str(secrets),
            **settings,
        )

    @contextlib.asynccontextmanager
    async def controller(self) -> AsyncIterator[Controller]:
        """A life of it. What runs goes on when the context ends, unless it has been told to end."""

        one = Controller()
        cluster = Cluster(self.config, "cpu", self.hosts, self.members, begun_on="a", answers=one.app.set_result)
        async with asyncio.timeout(PATIENCE_S):
            notes, there = await cluster.noted()
            one.life = await prepared(cluster, notes, there, one.process, one.news, self.ready.append)
        one.living = asyncio.create_task(one.life.live())
        try:
            await until(lambda: self.ready or one.living.done(), "it to be ready")
            yield one
        finally:
            one.living.cancel()
            await asyncio.wait([one.living])
            assert "control" not in {task.get_name() for task in asyncio.all_tasks()}, "nobody goes on for it"

    async def answers(self) -> bool:
        body = {"model": "epd-demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        with contextlib.suppress(httpx.TransportError):
            async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S) as client:
                url = f"http://127.0.0.1:{self.port}/v1/chat/completions"
                return (await client.post(url, json=body)).status_code == 200
        return False


class Controller:
    life: ClusterLife
    living: asyncio.Task[int]

    def __init__(self) -> None:
        self.process = Process()
        self.news = News()
        self.app: asyncio.Future[FastAPI] = asyncio.get_running_loop().create_future()

    @property
    def lines(self) -> list[str]:
        return [values[0] for name, values in self.news._events if name == "line"]

    async def asks(self, method: str, path: str, **body: Any) -> dict[str, Any]:
        transport = httpx.ASGITransport(await asyncio.wait_for(asyncio.shield(self.app), PATIENCE_S))
        async with httpx.AsyncClient(transport=transport, base_url="http://deployment", timeout=PATIENCE_S) as http:
            answer = await http.request(method, path, json=body or None)
            assert answer.is_success, answer.text
            told: dict[str, Any] = answer.json()
            return told

    async def status(self) -> dict[str, Any]:
        return await self.asks("GET", "/deployment")

    async def whole(self, count: int = 0) -> dict[str, dict[str, Any]]:
        """Its instances, by id, once nothing is to be done and there are so many (0: any)."""

        async def steady() -> dict[str, dict[str, Any]]:
            status = await self.status()
            instances = {one["id"]: one for one in status["instances"]}
            up = all(one["phase"] == "up" for one in instances.values())
            there = len(instances) == count if count else bool(instances)
            return instances if status["state"] == "steady" and up and there else {}

        found: dict[str, dict[str, Any]] = await until(steady, "all up")
        return found


@contextlib.asynccontextmanager
async def world(folder: Path, layout: str, *hosts: str, **settings: Any) -> AsyncIterator[World]:
    made = World(folder, layout, *hosts, **settings)
    try:
        yield made
    finally:
        await made.hosts.end()


async def test_two_nodes_serve_are_scaled_and_end(tmp_path: Path) -> None:
    async with world(tmp_path, "E-P-3D", "a", "b") as w, w.controller() as one:
        instances = await one.whole()
        assert {each["node"] for each in instances.values()} == {"a", "b"} and len(w.ready) == 1
        assert [await w.answers() for _ in range(3)] == [True] * 3
        parts = (await one.status())["parts"]
        assert {"controller", "a/node", "a/control", "a/front.0", "b/node", "b/control"} <= parts.keys()
        await one.asks("POST", "/deployment/scale", counts={"D": 4})
        assert len(await one.whole(6)) == 6 and await w.answers()
        data, _ = await one.life.nodes.log(instances["P0"]["node"], "P0", 0)
        assert data
        one.process.take(signal.SIGTERM)
        assert await asyncio.wait_for(one.living, PATIENCE_S) == 0 == one.process.code
        assert not await w.answers()


async def test_a_node_process_that_is_killed_is_told_again_and_no_other_notices(tmp_path: Path) -> None:
    async with world(tmp_path, "E-P-3D", "a", "b") as w, w.controller() as one:
        before, node = await one.whole(), "b"
        assert {each["node"] for each in before.values()} == {"a", node}
        await w.hosts.kill(node)

        async def begun_again() -> bool:
            now = await one.whole()
            return all(
                (now[name]["incarnation"] != each["incarnation"]) == (each["node"] == node)
                for name, each in before.items()
                if name in now
            ) and len(now) == len(before)

        await until(begun_again, "it to begin again")
        await until(w.answers, "an answer")


@pytest.mark.slow
async def test_what_ran_on_a_host_that_has_gone_runs_on_others_and_one_that_comes_is_used(tmp_path: Path) -> None:
    async with world(tmp_path, "E-P-4D", "a", "b") as w, w.controller() as one:
        before = await one.whole()
        assert {each["node"] for each in before.values()} == {"a", "b"}
        await w.hosts.dies("b")
        await until(lambda: any("has gone" in line for line in one.lines), "it to be noticed")
        await until(w.answers, "an answer of those that are left")
        w.hosts.comes("c")

        async def moved() -> bool:
            instances = {each["id"]: each["node"] for each in (await one.status())["instances"]}
            return len(instances) == 6 and set(instances.values()) == {"a", "c"}

        await until(moved, "its instances to be elsewhere")
        after = await one.whole()
        stayed = [name for name, each in before.items() if each["node"] == "a"]
        assert stayed and all(after[name]["incarnation"] == before[name]["incarnation"] for name in stayed)


async def test_a_node_that_differs_is_taken_in_when_the_others_have_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.cluster.nodes.differences", lambda one, other: [f"{one.machine.id} is another"])
    async with world(tmp_path, "E-P-D", "a") as w, w.controller() as one:
        await one.whole()
        w.hosts.comes("b")
        await until(lambda: "b is another" in one.life.nodes.left_out.get("b", ""), "it to be left out")
        await w.hosts.dies("a")
        await until(lambda: any("(b) has come" in line for line in one.lines), "it to be taken in")

        async def moved() -> bool:
            return {each["node"] for each in (await one.whole()).values()} == {"b"}

        await until(moved, "its instances to be there")
        assert one.life.nodes.left_out == {}


async def test_the_next_controller_goes_on_and_the_one_before_it_is_over(tmp_path: Path) -> None:
    async with world(tmp_path, "E-P-D", "a", "b") as w, w.controller() as first:
        await first.whole()
        await first.asks("POST", "/deployment/scale", counts={"D": 2})
        before = await first.whole(4)
        async with w.controller() as second:
            with pytest.raises(EpdError, match="another controller"):
                await asyncio.wait_for(asyncio.shield(first.living), PATIENCE_S)
            after = await second.whole()
            assert {name: each["incarnation"] for name, each in after.items()} == {
                name: each["incarnation"] for name, each in before.items()
            }
            assert (await second.status())["layout"] == "E-P-2D" and len(w.ready) == 1 and await w.answers()


async def test_a_controller_that_comes_when_a_node_has_lost_everything_tells_it_all(tmp_path: Path) -> None:
    async with world(tmp_path, "E-P-D", "a") as w:
        async with w.controller() as first:
            before = await first.whole()
        os.kill(w.hosts.found("a").pid, signal.SIGKILL)
        await until(lambda: w.hosts.found("a") is None, "its end")
        async with w.controller() as second:
            assert (await second.whole()).keys() == before.keys()


async def test_what_no_host_can_have_is_refused(tmp_path: Path) -> None:
    async with world(tmp_path, "E-P-9D", "a", "b") as w:
        with pytest.raises(ConfigError, match="needs 11 devices"):
            async with w.controller():
                pass


async def test_a_first_start_that_fails_ends_its_node_processes(tmp_path: Path) -> None:
    """Where somebody starts them again they wait to be told anew."""
    async with world(tmp_path, "E-P-D", "a", "b", startup_timeout_s=0.01) as w, w.controller() as one:
        assert await asyncio.wait_for(asyncio.shield(one.living), PATIENCE_S) == 1 == one.process.code
        await until(lambda: w.hosts.found("a") is None is w.hosts.found("b"), "their end")
