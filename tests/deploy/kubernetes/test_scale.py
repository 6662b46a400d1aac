"""How many pods there should be, and that the API server is told so: conflicts, refusals and pods in use included."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection

import pytest

from deploy.cluster.hosts import Host, Reserver
from deploy.cluster.leases import ClusterLeases
from deploy.kubernetes import scale
from deploy.kubernetes.hosts import RANGE, KubernetesHosts
from deploy.kubernetes.scale import PodScale, pods_wanted, range_of
from deploy.runtime.leases import Place
from epd_serve.errors import ConfigError
from tests.deploy.kubernetes.api_server import DEPLOYMENT, FakeApiServer
from tests.deploy.kubernetes.test_hosts import hosts, pod
from tests.deploy.rooted_here import StateHere
from tests.waiting import until

PATCH = f"PATCH {DEPLOYMENT}/scale"


@pytest.mark.parametrize(
    ("leased", "more", "pods"),
    [
        ("", [], 1),
        ("a4", [], 1),
        ("a4 b1", [], 2),
        ("b1", [], 1),
        ("a4", [1], 2),
        ("a3", [1], 1),
        ("a3", [4, 1, 4], 3),
        ("a2 b2", [2, 2, 1], 3),
        ("a1", [8], 1),
        ("a4 -2", [], 2),
    ],
)
def test_pods_are_wanted_for_what_is_leased_where_it_is_and_for_more(leased: str, more: list[int], pods: int) -> None:
    there = [Host(name, name, 4) for name in "abc"]
    places = [
        Place(str(at), int(text[1:]), text[0].strip("-"), tuple(range(int(text[1:]))))
        for at, text in enumerate(leased.split())
    ]
    assert pods_wanted(there, places, more) == pods


@pytest.mark.parametrize("text", ["", "3", "0-2", "4-2", "a-b", "-1"])
def test_a_range_is_first_and_last(text: str) -> None:
    assert range_of("1-8") == (1, 8)
    with pytest.raises(ConfigError, match="is not FIRST-LAST"):
        range_of(text)


class World:
    """With its nodes, as `deploy.cluster.nodes.Nodes`."""

    leaving, left_out = set[str](), set[str]()

    def __init__(self, server: FakeApiServer, one: KubernetesHosts) -> None:
        self.server = server
        self.hosts = one
        self.lines: list[str] = []
        self.scale = PodScale(one, self.lines.append)
        self.leases = ClusterLeases("cpu", "pack", StateHere(), self, Reserver(), acquire_s=30.0)
        self.scale.leases = self.leases

    @property
    def devices(self) -> dict[str, range]:
        return {host.id: range(host.devices) for host in self.hosts.there}

    async def run_on(self, nodes: Collection[str]) -> None: ...

    def costs(self) -> dict[str, str]:
        return {name: self.server.annotations(name).get(scale.COST, "0") for name in sorted(self.server.pods)}

    def comes(self, name: str) -> None:
        self.server.put(pod(name))
        self.server.pods[name]["metadata"]["annotations"][RANGE] = "1-3"
        self.server.put(self.server.pods[name])


@contextlib.asynccontextmanager
async def world(server: FakeApiServer, monkeypatch: pytest.MonkeyPatch, *pods: str) -> AsyncIterator[World]:
    monkeypatch.setattr(scale, "LOOK_S", 0.05)
    monkeypatch.setattr(scale, "AGAIN_S", 0.1)
    server.replicas = len(pods)
    async with hosts(server) as one:
        w = World(server, one)
        for name in pods:
            w.comes(name)
        await until(lambda: len(one.there) == len(pods))
        running = asyncio.create_task(w.scale.run())
        try:
            yield w
            assert not running.done(), running.exception()
        finally:
            running.cancel()
            await asyncio.wait([running])


async def test_pods_come_for_what_is_wanted_and_go_when_they_have_not_been_for_a_while(
    server: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(server, monkeypatch, "a") as w:
        (first,) = await w.leases.acquire([4])
        server.conflicts = 2
        server.refusals = ["conflict"]
        w.leases.want([4, 4, 4, 4])
        await until(lambda: server.replicas == 3, "as many as may be")
        for name in "bc":
            w.comes(name)
        await until(lambda: "epd-node is scaled from 1 to 3 pods" in w.lines)
        assert server.conflicts == 0
        (second,) = await w.leases.acquire([4])
        await until(
            lambda: w.costs() == {"a": "1000", "b": "1000", "c": "0"}, "the one that is free to be the cheapest"
        )
        assert {metric.name: metric.samples[0].value for metric in w.scale.collect()} == {
            "epd_control_nodes": 3,
            "epd_control_nodes_left_out": 0,
            "epd_control_nodes_wanted": 2,
        }
        assert server.replicas == 3, "not yet"
        w.scale.unused_s = 0.2
        await until(lambda: server.replicas == 2, "fewer")
        server.remove("c")
        await w.leases.release([first.lease, second.lease])
        await until(lambda: w.costs() == {"a": "0", "b": "0"} and server.replicas == 1, "one to be left")


async def test_without_a_range_there_are_only_metrics(server: FakeApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(server, monkeypatch, "a") as w:
        del server.pods["a"]["metadata"]["annotations"][RANGE]
        server.put(server.pods["a"])
        await w.leases.acquire([4])
        w.leases.want([4])
        await until(lambda: w.scale.wanted == 2)
        await until(lambda: w.costs() == {"a": "1000"})
        assert PATCH not in server.asked and server.replicas == 1


async def test_what_is_refused_is_said_and_tried_again(server: FakeApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(server, monkeypatch, "a") as w:
        server.refusals = ["forbidden"] * 2
        await w.leases.acquire([4])
        w.leases.want([4])
        await until(lambda: server.replicas == 2, "it to be allowed")
        assert any("403" in line for line in w.lines)


async def test_a_server_that_is_away_is_asked_until_it_is_back(
    server: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(server, monkeypatch, "a") as w:
        await w.leases.acquire([4])
        await server.stop()
        w.leases.want([4])
        await until(lambda: any("does not answer" in line for line in w.lines), "it to be said")
        await server.start()
        await until(lambda: server.replicas == 2 and w.costs() == {"a": "1000"}, "it to be carried out")


async def test_a_pod_that_is_left_out_says_why_until_it_is_taken_in(
    server: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(server, monkeypatch, "a", "b") as w:
        (one,) = [host.id for host in w.hosts.there if host.name == "b"]
        w.scale.left_out = {one: "it is another", "gone": "it was another"}
        await until(lambda: server.annotations("b").get(scale.LEFT_OUT) == "it is another", "it to say so")
        assert scale.LEFT_OUT not in server.annotations("a")
        assert {metric.name: metric.samples[0].value for metric in w.scale.collect()}["epd_control_nodes_left_out"] == 1
        w.scale.left_out = {}
        await until(lambda: scale.LEFT_OUT not in server.annotations("b"), "it to be forgotten")
