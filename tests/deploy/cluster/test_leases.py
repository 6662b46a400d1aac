"""Devices of nodes are leased: all or none, each once, packed or spread, and moved before their node has gone."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from deploy.cluster.hosts import Reserver
from deploy.cluster.leases import ClusterLeases
from deploy.runtime.leases import LeaseError, Place
from epd_serve.errors import EpdError
from tests.deploy.rooted_here import StateHere
from tests.waiting import until


@dataclass
class Nodes:
    """As `deploy.cluster.nodes.Nodes`. `needed`: on which something of ours is to run, by turn."""

    devices: dict[str, Sequence[int]]
    leaving: set[str] = field(default_factory=set)
    left_out: set[str] = field(default_factory=set)
    needed: list[set[str]] = field(default_factory=list)
    mute: str = ""

    async def run_on(self, nodes: Collection[str]) -> None:
        if self.mute in nodes:
            raise EpdError("the node does not answer")
        self.needed.append(set(nodes))


class Scheduler(Reserver):
    """As Ray. Attributes: others: devices that somebody takes without a word, by node, and with one; kept; wanted."""

    def __init__(self) -> None:
        self.silent: Counter[str] = Counter()
        self.others: Counter[str] = Counter()
        self.kept: dict[str, str] = {}
        self.wanted: tuple[list[int], set[str]] = ([], set())

    async def look(self, places: Mapping[str, Place]) -> tuple[Collection[str], Mapping[str, int]]:
        return {lease for lease, one in places.items() if self.kept.get(lease) == one.node}, self.others

    async def reserve(
        self, lease: str, width: int, able: Sequence[str], within_s: float
    ) -> tuple[str, tuple[int, ...]]:
        for node in able:
            if not self.silent[node]:
                self.kept[lease] = node
                return node, tuple(range(100, 100 + width))
        return "", ()

    async def keep(self, places: Mapping[str, Place]) -> None:
        self.kept = {lease: node for lease, node in self.kept.items() if lease in places and places[lease].node == node}

    async def want(self, widths: Sequence[int], not_on: Collection[str]) -> None:
        self.wanted = [*widths], {*not_on}


class World:
    def __init__(self, **nodes: int) -> None:
        self.nodes = Nodes({name: range(10, 10 + devices) for name, devices in nodes.items()})
        self.notes = StateHere()
        self.reserver = Reserver()

    def leases(self, placement: str = "pack", acquire_s: float = 0.05) -> ClusterLeases:
        return ClusterLeases("npu", placement, self.notes, self.nodes, self.reserver, acquire_s)


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


async def test_what_is_on_a_node_that_leaves_moves_while_it_is_there() -> None:
    w = World(a=2, b=3)
    leases = w.leases()
    before = await leases.acquire([2, 1])
    assert [one.node for one in before] == ["b", "b"]
    w.nodes.leaving.add("b")
    moved = await leases.places()
    assert where(moved) == [("a", (10, 11)), ("b", (12,))], "what has no room elsewhere stays as long as it can"
    assert await leases.free() == {"a": 0}, "who leaves gets nothing new"
    del w.nodes.devices["b"]
    waits = (await leases.places())[1]
    assert (waits.node, waits.devices, waits.waits) == ("", (), "1 free npu on one node")
    w.nodes.devices["c"] = [10]
    assert where(await leases.places()) == [("a", (10, 11)), ("c", (10,))]
    assert [one.lease for one in await leases.places()] == [one.lease for one in before]


async def test_the_next_controller_finds_what_is_noted_and_keeps_it() -> None:
    w = World(a=2, b=2)
    noted = await w.leases().acquire([2, 2])
    again = w.leases()
    assert await again.places() == noted and await again.free() == {"a": 0, "b": 0}
    await again.release([noted[1].lease])
    assert where(await again.acquire([1])) == [("b", (10,))]


async def test_who_asks_waits_for_nodes_to_come_and_says_what_is_wanted_meanwhile() -> None:
    w = World(a=1)
    leases = w.leases(acquire_s=30.0)
    leases.want([3])
    assert leases.wanted == (3,)
    asking = asyncio.create_task(leases.acquire([1, 2]))
    await until(lambda: leases.wanted == (1, 2), "it to be said")
    w.nodes.devices["b"] = [10, 11]
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
    w.nodes.leaving.add("a")
    assert [one.node for one in await anext(watch)] == ["b"]


async def test_devices_that_others_have_are_not_free_and_those_of_a_scheduler_are_as_it_says() -> None:
    w = World(a=4, b=2)
    w.reserver = scheduler = Scheduler()
    scheduler.others["a"] = 3
    leases = w.leases()
    assert await leases.free() == {"a": 1, "b": 2}
    assert where(await leases.acquire([2])) == [("b", (100, 101))]
    scheduler.others["a"], scheduler.silent["a"] = 0, 1
    with pytest.raises(LeaseError):
        await leases.acquire([4])
    assert scheduler.kept == {"0": "b"} and [one.lease for one in await leases.places()] == ["0"]


async def test_where_a_node_has_no_room_after_all_another_one_is_taken() -> None:
    w = World(a=4, b=2)
    w.reserver = scheduler = Scheduler()
    scheduler.silent["a"] = 4
    assert [one.node for one in await w.leases().acquire([1])] == ["b"]


async def test_what_a_controller_did_not_get_to_note_is_given_back_by_the_next() -> None:
    w = World(a=4)
    w.reserver = scheduler = Scheduler()
    noted = await w.leases().acquire([1])
    scheduler.kept["7"] = "a"
    assert await w.leases().places() == noted and scheduler.kept == {"0": "a"}


async def test_what_waits_is_wanted_beyond_the_nodes_that_cannot_have_it() -> None:
    w = World(a=2, b=2)
    w.reserver = scheduler = Scheduler()
    w.nodes.left_out = {"x"}
    leases = w.leases("strict_spread")
    await leases.acquire([2, 2])
    leases.want([1])
    await leases.places()
    assert scheduler.wanted == ([1], {"a", "b", "x"})
    del w.nodes.devices["a"]
    await leases.places()
    assert scheduler.wanted == ([1, 2], {"b", "x"}) and len(scheduler.kept) == 1
    w.nodes.devices["c"] = [0, 1]
    assert {one.node for one in await leases.places()} == {"b", "c"} and scheduler.wanted[0] == [1]


async def test_a_node_is_made_ready_before_anybody_hears_that_something_is_leased_there() -> None:
    w = World(a=2, b=1)
    leases = w.leases()
    first = await leases.acquire([1])
    assert w.nodes.needed[-1] == {"a"}
    w.nodes.mute = "b"
    with pytest.raises(EpdError, match="does not answer"):
        await leases.acquire([1, 1])
    assert await leases.places() == first, "nothing stays leased on a node that is not ready"
    await leases.release([first[0].lease])
    assert await leases.places() == () and w.nodes.needed[-1] == set()
