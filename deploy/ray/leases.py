"""Devices reserved on the cluster: a placement group with one bundle for each lease, so that each can be given back.

The groups are detached and found again by their names. Which node a bundle is to be on is chosen here, from what nobody
has reserved by a placement group; when that node dies, or others use its devices without one, Ray chooses another one
that has room. Which devices of its node a bundle has, a short task in it says; virtual ones of CPUs, of which Ray knows
nothing, are numbered here. What was said once is noted and stays, for as long as the bundle is where it was.

What would be leased if it were there is a placement group, too, which waits: Ray's autoscaler starts nodes for it. Not
`request_resources`: a cluster has one of that, and whoever calls it takes back what others have asked for. Such a group
is not detached, it ends with whoever asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deploy.cluster.nodes import WANTED
from deploy.host.state import State
from deploy.ray.cluster import nodes_alive
from deploy.runtime.leases import LeaseError, Place

RESOURCES = {"npu": "NPU", "cuda": "GPU", "cpu": "CPU"}
"""What Ray calls a device of each kind."""

NOTE, AGAIN = "leases.json", "/anywhere"
"""The note of what is leased; and how the name of a group goes on that need not be on the node that was chosen here."""

NODE_LABEL = "ray.io/node-id"
ACQUIRE_S, CHOSEN_S = 10.0, 2.0
"""For Ray to find room, and on the node that was chosen here."""

IDS_S = 60.0
"""For the task that says which devices a bundle has: Ray may have to start a worker for it."""

LOOK_S = 0.5
Row = Mapping[str, Any]
"""A placement group, as Ray's table has it."""


class RayLeases:
    """`Leases` of one deployment.

    Args:
        kind: of its devices. placement: `pack`, `spread` or `strict_spread`, over nodes.
        notes: of the deployment.
        run_on: has a process of ours run on each of these nodes, and need keep none on others. Called with all nodes
            that have leased devices, before anybody is told of these. Raises EpdError.
        left_out: nodes that it cannot use.
        acquire_s: how long Ray may take to find room.
    """

    def __init__(
        self,
        deployment: str,
        kind: str,
        placement: str,
        notes: State,
        run_on: Callable[[Collection[str]], Awaitable[None]],
        left_out: Collection[str] = (),
        acquire_s: float = ACQUIRE_S,
    ) -> None:
        self._prefix = f"{_prefix(deployment)}lease/"
        self._wanted_prefix = f"{_prefix(deployment)}wanted/"
        self._wanted: Sequence[int] = ()
        self._asked: Sequence[int] = ()
        self._kind = kind
        self._resource = RESOURCES[kind]
        self._placement = placement
        self._notes = notes
        self._left_out = left_out
        self._run_on = run_on
        self._acquire_s = acquire_s
        noted = msgspec.json.decode(notes.read(NOTE) or b"[]", type=list[Place])
        self._places = {place.lease: place for place in noted}
        self._one_at_a_time = asyncio.Lock()
        self._removing: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    async def acquire(self, widths: Sequence[int]) -> tuple[Place, ...]:
        async with self._one_at_a_time:
            if self._asked:
                await self._withdraw()
            self._wanted = ()
            made: list[Place] = []
            until, free = time.monotonic() + self._acquire_s, dict(await self.free())
            try:
                for width in widths:
                    place = await self._acquire(width, made, free, until)
                    made.append(place)
                    free[place.node] = free.get(place.node, 0) - width
                await self._run_on(_nodes([*self._places.values(), *made]))
            except BaseException:
                await asyncio.shield(self._tidy())
                raise
            self._note({**self._places, **{place.lease: place for place in made}})
            return tuple(made)

    async def places(self) -> tuple[Place, ...]:
        async with self._one_at_a_time:
            await self._look()
            return tuple(self._places.values())

    async def free(self) -> Mapping[str, int]:
        alive = await asyncio.to_thread(nodes_alive)
        free = {node.id: int(node.resources.get(self._resource, 0)) for node in alive if node.id not in self._left_out}
        for row in await asyncio.to_thread(_rows):
            if self._wanted and row["name"].startswith(self._wanted_prefix):
                continue  # nodes that have come for it are ours to lease
            for at, resources in row["bundles"].items():
                node = row["bundles_to_node_id"].get(at)
                if node in free:
                    free[node] = max(0, free[node] - int(resources.get(self._resource, 0)))
        return free

    async def release(self, leases: Iterable[str]) -> None:
        async with self._one_at_a_time:
            gone = set(leases) & self._places.keys()
            if gone:
                self._note({name: place for name, place in self._places.items() if name not in gone})
                await self._tidy()

    def want(self, widths: Sequence[int]) -> None:
        self._wanted = tuple(widths)
        if widths and self._notes.read(WANTED) is None:
            self._notes.write(WANTED, b"")
        self._changed.set()

    async def watch(self) -> AsyncIterator[tuple[Place, ...]]:
        told: tuple[Place, ...] | None = None
        while True:
            self._changed.clear()
            await self._ask()
            if (now := await self.places()) != told:
                told = now
                yield now
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._changed.wait()

    async def tidy(self) -> None:
        """Give back what a controller before this one has not got to note, or to give back."""
        async with self._one_at_a_time:
            await self._tidy()
            await self._withdraw()

    # --- one lease ------------------------------------------------------------------------------------------------

    async def _acquire(self, width: int, made: Sequence[Place], free: Mapping[str, int], until: float) -> Place:
        others = [*self._places.values(), *made]
        numbers = [int(place.lease.removeprefix(self._prefix)) for place in others]
        name = f"{self._prefix}{max(numbers, default=-1) + 1}"
        ours = Counter(place.node for place in others if place.node)
        if chosen := self._chosen(width, ours, free):
            group = await self._reserve(name, width, ours, chosen, lifetime="detached")
            if await asyncio.to_thread(group.wait, max(0.1, min(CHOSEN_S, until - time.monotonic()))):
                return await self._placed(name, width, _row(await self._groups(), name), others)
            await asyncio.to_thread(remove_placement_group, group)
        group = await self._reserve(f"{name}{AGAIN}", width, ours, lifetime="detached")
        if not await asyncio.to_thread(group.wait, max(0.1, until - time.monotonic())):
            raise LeaseError(self._kind, [width], await self.free())
        return await self._placed(name, width, _row(await self._groups(), name), others)

    async def _reserve(
        self, name: str, width: int, ours: Iterable[str], chosen: str = "", **options: Any
    ) -> PlacementGroup:
        """`ours`: nodes on which something is leased. `chosen`: the node on which it is to be, "" for any. `options`:
        of `placement_group`."""
        not_on = {*self._left_out, *(ours if self._placement == "strict_spread" else ())}
        on = chosen or (f"!in({','.join(sorted(not_on))})" if not_on else "")
        return await asyncio.to_thread(
            placement_group,
            [{self._resource: width}],
            strategy="STRICT_PACK",
            name=name,
            bundle_label_selector=[{NODE_LABEL: on}] if on else None,
            **options,
        )

    def _chosen(self, width: int, ours: Mapping[str, int], free: Mapping[str, int]) -> str:
        """The node on which it is to be if that still has room when Ray is asked; "" where none has.

        Args:
            ours: leases of each node that has any.
        """
        able = [node for node, count in free.items() if count >= width]
        if self._placement == "strict_spread":
            able = [node for node in able if node not in ours]
        if self._placement == "pack":
            return max(able, key=lambda node: (node in ours, free[node]), default="")
        return max(able, key=lambda node: (-ours.get(node, 0), free[node]), default="")

    async def _placed(self, lease: str, width: int, row: Row, others: Iterable[Place]) -> Place:
        """Where a lease's bundle is now."""
        node = _node(row)
        if not node:
            return Place(lease, width, "", (), f"{width} free {self._resource} on one node")
        if self._kind == "cpu":
            taken = {device for place in others if place.node == node for device in place.devices}
            free = [device for device in range(len(taken) + width) if device not in taken]
            return Place(lease, width, node, tuple(free[:width]))
        try:
            async with asyncio.timeout(IDS_S):
                return Place(lease, width, node, await self._ids(row, width))
        except TimeoutError:
            return Place(lease, width, "", (), f"which {self._resource} it has on node {node}")

    async def _ids(self, row: Row, count: int) -> tuple[int, ...]:
        asking = ray.remote(_device_ids).options(
            num_cpus=0,
            **({"num_gpus": count} if self._resource == "GPU" else {"resources": {self._resource: count}}),
            scheduling_strategy=PlacementGroupSchedulingStrategy(_group(row), placement_group_bundle_index=0),
        )
        ids: list[str] = await asking.remote(self._resource)
        return tuple(sorted(map(int, ids)))

    # --- all of them ----------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        """Take in what has moved, and what somebody else has removed."""
        groups = await self._groups()
        now: dict[str, Place] = {}
        for name, place in self._places.items():
            if not (row := _row(groups, name)):
                continue
            if place.node and _node(row) == place.node:
                now[name] = place
                continue
            others = [now.get(one.lease, one) for one in self._places.values() if one.lease != name]
            if not _node(row) and row["name"] == name:  # the node that was chosen has gone
                await self._reserve(f"{name}{AGAIN}", place.width, _nodes(others), lifetime="detached")
                removing = asyncio.create_task(_remove([row]))  # it may wait for that node
                self._removing.add(removing)
                removing.add_done_callback(self._removing.discard)
            now[name] = await self._placed(name, place.width, row, others)
        await self._run_on(_nodes(now.values()))
        if now != self._places:
            self._note(now)

    async def _tidy(self) -> None:
        groups = await self._groups()
        await _remove(row for name, row in groups.items() if name.removesuffix(AGAIN) not in self._places)

    async def _ask(self) -> None:
        """Have a placement group for each width that is wanted, and no other."""
        if self._wanted == self._asked:
            return
        async with self._one_at_a_time:
            wanted = self._wanted
            counts = Counter(wanted).items()
            names = {f"{self._wanted_prefix}{width}/{number}" for width, count in counts for number in range(count)}
            there = await asyncio.to_thread(_groups, self._wanted_prefix)
            await _remove(row for name, row in there.items() if name not in names)
            ours = _nodes(self._places.values())
            for name in sorted(names - there.keys()):
                await self._reserve(name, _width(name), ours)
            self._asked = wanted

    async def _withdraw(self) -> None:
        await _remove((await asyncio.to_thread(_groups, self._wanted_prefix)).values())
        self._wanted = self._asked = ()

    async def _groups(self) -> dict[str, Row]:
        return await asyncio.to_thread(_groups, self._prefix)

    def _note(self, places: dict[str, Place]) -> None:
        self._places = places
        self._notes.write(NOTE, msgspec.json.encode(list(places.values())))
        self._changed.set()


async def release_all(deployment: str) -> None:
    """Whatever this deployment has reserved on the cluster."""
    groups = await asyncio.to_thread(_groups, _prefix(deployment))
    await _remove(groups.values())


def _prefix(deployment: str) -> str:
    """Of the names of all that it reserves."""
    return f"epd-serve/{deployment}/"


def _rows() -> list[Row]:
    """Of all that is reserved on the cluster."""
    return [row for row in placement_group_table().values() if row["state"] != "REMOVED"]


def _row(groups: Mapping[str, Row], lease: str) -> Row:
    """Of this lease; empty where somebody has removed it."""
    return groups.get(f"{lease}{AGAIN}") or groups.get(lease) or {}


def _groups(prefix: str) -> dict[str, Row]:
    """By name."""
    return {row["name"]: row for row in _rows() if row["name"].startswith(prefix)}


async def _remove(rows: Iterable[Row]) -> None:
    for row in rows:
        await asyncio.to_thread(remove_placement_group, _group(row))


def _group(row: Row) -> PlacementGroup:
    return PlacementGroup(ray.PlacementGroupID.from_hex(row["placement_group_id"]))


def _node(row: Row) -> str:
    """Where its bundle is; "" while it has no place."""
    return str(row["bundles_to_node_id"].get(0) or "") if row["state"] == "CREATED" else ""


def _nodes(places: Iterable[Place]) -> set[str]:
    """On which any of them is."""
    return {place.node for place in places if place.node}


def _width(name: str) -> int:
    """Of what is wanted under this name."""
    return int(name.split("/")[-2])


def _device_ids(resource: str) -> list[str]:
    """In the bundle."""
    ids: list[str] = ray.get_runtime_context().get_accelerator_ids()[resource]
    return ids
