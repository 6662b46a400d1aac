"""Devices reserved on three nodes, each with 6 CPUs, 2 GPUs and 2 NPUs that only Ray knows of."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Collection
from functools import partial

import pytest
import ray
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deploy.cluster.leases import ClusterLeases
from deploy.host.state import State
from deploy.ray.cluster import nodes_alive
from deploy.ray.leases import RESOURCES, PlacementGroups, release_all
from deploy.runtime.leases import LeaseError, Place
from tests.deploy.ray.nodes import RayNodes
from tests.deploy.rooted_here import StateHere
from tests.waiting import until

pytestmark = pytest.mark.asyncio
CPUS = 6  # of each node, as conftest.py has them
EACH = {"npu": 2, "cuda": 2, "cpu": CPUS}
IDS = pytest.mark.slow  # Ray starts a worker that says which devices they are


class Nodes:
    """As `deploy.cluster.nodes.Nodes`: all nodes of the cluster, but for those that are left out."""

    leaving = set[str]()

    def __init__(self, kind: str, left_out: Collection[str] = ()) -> None:
        self.left_out, self._resource = {*left_out}, RESOURCES[kind]

    @property
    def devices(self) -> dict[str, range]:
        alive = {one.id: range(int(one.resources.get(self._resource, 0))) for one in nodes_alive()}
        return {node: ids for node, ids in alive.items() if node not in self.left_out}

    async def run_on(self, nodes: Collection[str]) -> None:
        """Nothing has to run beside what is leased."""


def another(kind: str, placement: str, notes: State, nodes: Nodes, acquire_s: float = 10.0) -> ClusterLeases:
    """Of another controller."""
    return ClusterLeases(kind, placement, notes, nodes, PlacementGroups("leases", kind), acquire_s)


@contextlib.asynccontextmanager
async def leases(
    kind: str, placement: str = "pack", left_out: Collection[str] = (), acquire_s: float = 10.0
) -> AsyncIterator[ClusterLeases]:
    everything = another(kind, placement, StateHere(), Nodes(kind))
    for node in await everything.free():  # a moment after others have given it back
        await until(partial(_has_free, everything, node, EACH[kind]), "all devices")
    made = another(kind, placement, StateHere(), Nodes(kind, left_out), acquire_s)
    try:
        yield made
    finally:
        await release_all("leases")


async def _has_free(held: ClusterLeases, node: str, least: int) -> bool:
    return (await held.free()).get(node, least) >= least


async def _is_free(held: ClusterLeases, node: str, count: int) -> bool:
    """Ray says so a moment later."""
    return (await held.free()).get(node) == count


def devices(places: tuple[Place, ...]) -> list[tuple[str, int]]:
    return [(place.node, device) for place in places for device in place.devices]


@pytest.mark.parametrize("kind", [pytest.param("npu", marks=IDS), pytest.param("cuda", marks=IDS), "cpu"])
async def test_each_lease_has_devices_of_one_node_and_its_own(connected: RayNodes, kind: str) -> None:
    each = EACH[kind]
    async with leases(kind) as held:
        before = dict.fromkeys(await held.free(), each)
        places = await held.acquire([2, 1, 1])
        assert [len(place.devices) for place in places] == [2, 1, 1]
        assert len(set(devices(places))) == 4
        assert all(0 <= device < each for _, device in devices(places))
        used = Counter(node for node, _ in devices(places))
        for node in before:
            await until(partial(_is_free, held, node, each - used[node]), "what is left")
        await held.release([places[0].lease])
        back = before[places[0].node] - used[places[0].node] + 2
        await until(partial(_is_free, held, places[0].node, back), "what was given back")
        assert await held.places() == places[1:]


async def test_what_cannot_be_had_as_a_whole_is_not_had_at_all(connected: RayNodes) -> None:
    async with leases("cpu", acquire_s=3.0) as held:
        first = await held.acquire([1])
        with pytest.raises(LeaseError) as refused:
            await held.acquire([CPUS] * 3)
        assert refused.value.missing == (CPUS,)
        assert await held.places() == first
        await until(partial(_is_free, held, first[0].node, CPUS - 1), "what was not taken")


async def test_the_next_controller_finds_what_is_leased_and_gives_back_the_rest(connected: RayNodes) -> None:
    async with leases("cpu") as held:
        places = await held.acquire([CPUS - 1, CPUS])
        await PlacementGroups("leases", "cpu").reserve("7", 1, [*Nodes("cpu").devices], 10.0)  # and nobody notes it
        after = another("cpu", "pack", held._notes, Nodes("cpu"))
        assert await after.places() == places
        await until(partial(_is_free, after, places[0].node, 1), "what was not noted")


async def test_a_pack_takes_no_second_node_while_the_first_has_room(connected: RayNodes) -> None:
    async with leases("cpu") as held:
        first = await held.acquire([1])
        await until(partial(_is_free, held, first[0].node, CPUS - 1), "that it is taken")
        places = await held.acquire([CPUS - 1, CPUS])
        assert places[0].node == first[0].node != places[1].node


@pytest.mark.parametrize("placement", ["spread", "strict_spread"])
async def test_a_spread_takes_node_after_node(connected: RayNodes, placement: str) -> None:
    async with leases("cpu", placement, acquire_s=3.0) as held:
        places = await held.acquire([1] * 3)
        assert len({place.node for place in places}) == 3
        if placement == "spread":
            assert len((await held.acquire([1]))[0].devices) == 1
        else:
            with pytest.raises(LeaseError):
                await held.acquire([1])


async def test_nodes_that_are_left_out_are_not_leased(connected: RayNodes) -> None:
    out = [node.id for node in connected.nodes[:2]]
    async with leases("cpu", left_out=out, acquire_s=3.0) as held:
        (place,) = await held.acquire([CPUS])
        assert place.node == connected.nodes[2].id
        with pytest.raises(LeaseError):
            await held.acquire([1])


async def _waiting() -> list[tuple[str, str]]:
    """What is wanted, by name, and whether it is there."""
    rows = [row for row in placement_group_table().values() if "/wanted/" in row["name"] and row["state"] != "REMOVED"]
    return sorted((row["name"], row["state"]) for row in rows)


async def _is_asked_for(names: list[str], state: str = "PENDING") -> bool:
    return await _waiting() == [(f"epd-serve/leases/wanted/{name}", state) for name in names]


@contextlib.asynccontextmanager
async def watched(held: ClusterLeases) -> AsyncIterator[None]:
    async def watch() -> None:
        async for _ in held.watch():
            pass

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_what_is_wanted_waits_in_the_cluster_for_as_long_as_it_is_wanted(connected: RayNodes) -> None:
    async with leases("cpu") as held, watched(held):
        free = await held.free()
        held.want([50, 50, 60])
        await until(partial(_is_asked_for, ["50/0", "50/1", "60/0"]), "that Ray is asked")
        assert await held.free() == free and await held.places() == ()
        held.want([50])
        await until(partial(_is_asked_for, ["50/0"]), "that Ray is asked for less")
        (place,) = await held.acquire([1])
        assert place.node and await _waiting() == [], "what is leased may be what has come"
        held.want([50])
        await until(partial(_is_asked_for, ["50/0"]), "that Ray is asked again")
        held.want([])
        await until(partial(_is_asked_for, []), "that nothing waits any more")
        held.want([60])
        await until(partial(_is_asked_for, ["60/0"]), "that Ray is asked")
        assert await another("cpu", "pack", StateHere(), Nodes("cpu")).places() == ()
        assert await _waiting() == [], "the next controller asks for what it wants itself"


async def test_a_node_that_comes_for_what_is_wanted_is_leased_by_whoever_wanted_it(connected: RayNodes) -> None:
    async with leases("cpu") as held, watched(held):
        held.want([CPUS + 2])
        await until(partial(_is_asked_for, [f"{CPUS + 2}/0"]), "that Ray is asked")
        coming = connected.add(num_cpus=CPUS + 3)
        try:
            await until(partial(_is_asked_for, [f"{CPUS + 2}/0"], "CREATED"), "the node")
            assert (await held.free())[coming.id] == CPUS + 3
            (place,) = await held.acquire([CPUS + 2])
            assert place.node == coming.id and await _waiting() == []
        finally:
            connected.lose(coming)


@pytest.mark.slow
async def test_the_lease_of_a_node_that_dies_moves_to_one_that_comes(connected: RayNodes) -> None:
    dying = connected.add(num_gpus=0, resources={"NPU": 3})
    async with leases("npu") as held:
        (place,) = await held.acquire([3])
        assert (place.node, place.devices) == (dying.id, (0, 1, 2))
        watched = held.watch()
        assert await anext(watched) == (place,)
        connected.lose(dying)
        (waiting,) = await anext(watched)
        assert (waiting.lease, waiting.node, waiting.devices) == (place.lease, "", ()) and "3 free npu" in waiting.waits
        coming = connected.add(num_gpus=0, resources={"NPU": 3})
        (moved,) = await anext(watched)
        assert (moved.lease, moved.node, len(moved.devices)) == (place.lease, coming.id, 3)
    connected.lose(coming)


class Using:
    """Of a node's devices, without a placement group."""

    def there(self) -> bool:
        return True


@pytest.mark.slow
async def test_a_node_whose_devices_are_used_without_a_word_is_passed_over(connected: RayNodes) -> None:
    async with leases("cpu") as held:
        free = await held.free()
        chosen = max(free, key=free.__getitem__)
        on = NodeAffinitySchedulingStrategy(chosen, soft=False)
        using = ray.remote(Using).options(num_cpus=free[chosen], scheduling_strategy=on).remote()
        assert await using.there.remote()
        assert (await held.free())[chosen] == free[chosen], "it cannot be known"
        (place,) = await held.acquire([1])
        assert place.node not in ("", chosen)
        ray.kill(using)
