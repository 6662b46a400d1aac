"""Devices of node pods are lent: all or none, each once, packed or spread, and moved before their pod has gone."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from deploy.cluster.hosts import Host
from deploy.kubernetes.leases import PodLeases
from deploy.runtime.leases import LeaseError, Place
from tests.waiting import until


class Kept(dict[str, bytes]):
    """As `deploy.host.state.State`."""

    def read(self, name: str) -> bytes | None:
        return self.get(name)

    def write(self, name: str, content: bytes) -> None:
        self[name] = content

    async def kept(self) -> None: ...


class World:
    """Attributes: pods by id; late: those that are no part of the deployment yet."""

    def __init__(self, **pods: int) -> None:
        self.pods = {name: Host(name, name, devices) for name, devices in pods.items()}
        self.late: set[str] = set()
        self.notes = Kept()

    def leases(self, placement: str = "pack", acquire_s: float = 0.05) -> PodLeases:
        def joined() -> dict[str, range]:
            return {id: range(10, 10 + one.devices) for id, one in self.pods.items() if id not in self.late}

        return PodLeases("npu", placement, self.notes, lambda: tuple(self.pods.values()), joined, acquire_s)

    def leaves(self, name: str) -> None:
        self.pods[name] = replace(self.pods[name], leaving=True)


def where(places: tuple[Place, ...]) -> list[tuple[str, tuple[int, ...]]]:
    return [(one.node, one.devices) for one in places]


async def test_devices_are_lent_once_all_or_none() -> None:
    w = World(a=4, b=4)
    leases = w.leases()
    assert where(await leases.acquire([2, 1])) == [("a", (10, 11)), ("a", (12,))]
    with pytest.raises(LeaseError, match=r"free npu devices \(4 on one node lacking; a has 1, b has 4\)") as caught:
        await leases.acquire([4, 4])
    assert caught.value.missing == (4,) and await leases.free() == {"a": 1, "b": 4}
    assert where(await leases.acquire([4, 1])) == [("b", (10, 11, 12, 13)), ("a", (13,))]
    assert len(await leases.places()) == 4 and await leases.free() == {"a": 0, "b": 0}
    first, *_ = await leases.places()
    await leases.release([first.lease, "nobody's"])
    assert await leases.free() == {"a": 2, "b": 0}


@pytest.mark.parametrize(("placement", "nodes"), [("pack", "aaab"), ("spread", "abcd"), ("strict_spread", "abcd")])
async def test_places_are_packed_or_spread(placement: str, nodes: str) -> None:
    w = World(a=3, b=3, c=3, d=3)
    leases = w.leases(placement)
    places = await leases.acquire([1] * 4)
    assert "".join(one.node for one in places) == nodes
    if placement == "strict_spread":
        with pytest.raises(LeaseError):
            await leases.acquire([1])


async def test_what_is_on_a_pod_that_leaves_moves_while_it_is_there() -> None:
    w = World(a=2, b=3)
    leases = w.leases()
    before = await leases.acquire([2, 1])
    assert [one.node for one in before] == ["b", "b"]
    w.leaves("b")
    moved = await leases.places()
    assert where(moved) == [("a", (10, 11)), ("b", (12,))], "what has no room elsewhere stays as long as it can"
    assert await leases.free() == {"a": 0}, "who leaves gets nothing new"
    del w.pods["b"]
    waits = (await leases.places())[1]
    assert (waits.node, waits.devices, waits.waits) == ("", (), "1 free npu on one pod")
    w.pods["c"] = Host("c", "c", 1)
    assert where(await leases.places()) == [("a", (10, 11)), ("c", (10,))]
    assert [one.lease for one in await leases.places()] == [one.lease for one in before]


async def test_a_pod_that_has_yet_to_join_lends_nothing_and_keeps_what_is_noted() -> None:
    w = World(a=2, b=2)
    noted = await w.leases().acquire([2, 2])
    w.late = {"b"}
    again = w.leases()
    assert await again.places() == noted and await again.free() == {"a": 0}
    await again.release([noted[1].lease])
    with pytest.raises(LeaseError):
        await again.acquire([1])
    w.late.clear()
    assert where(await again.acquire([1])) == [("b", (10,))]


async def test_who_asks_waits_for_pods_to_come_and_says_what_is_wanted_meanwhile() -> None:
    w = World(a=1)
    leases = w.leases(acquire_s=30.0)
    leases.want([3])
    assert leases.wanted == (3,)
    asking = asyncio.create_task(leases.acquire([1, 2]))
    await until(lambda: leases.wanted == (1, 2), "it to be said")
    w.pods["b"] = Host("b", "b", 2)
    assert where(await asking) == [("a", (10,)), ("b", (10, 11))]
    assert leases.wanted == ()


async def test_who_stops_asking_has_nothing() -> None:
    w = World(a=1)
    leases = w.leases(acquire_s=30.0)
    asking = asyncio.create_task(leases.acquire([2]))
    await until(lambda: leases.wanted == (2,))
    asking.cancel()
    await asyncio.wait([asking])
    assert asking.cancelled() and await leases.places() == () and leases.wanted == ()


async def test_a_watch_tells_each_change() -> None:
    w = World(a=2, b=2)
    leases = w.leases()
    watch = leases.watch()
    assert await anext(watch) == ()
    places = await leases.acquire([1])
    assert await anext(watch) == places
    w.leaves("a")
    assert [one.node for one in await anext(watch)] == ["b"]
