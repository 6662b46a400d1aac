"""Devices reserved on the cluster: a placement group with one bundle for each lease, so that each can be given back.

The groups are detached and found again by their names. Each is to be on the node that was chosen or, where others use
its devices without a placement group, on another one of those that seem to have room. Which devices of its node a
bundle has, a short task in it says; of virtual ones of CPUs Ray knows nothing.

What would be leased if it were there is a placement group, too, which waits: Ray's autoscaler starts nodes for it. Not
`request_resources`: a cluster has one of that, and whoever calls it takes back what others have asked for. Such a group
is not detached, it ends with whoever asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deploy.cluster.hosts import Reserver
from deploy.ray.cluster import made
from deploy.runtime.leases import Place

RESOURCES = {"npu": "NPU", "cuda": "GPU", "cpu": "CPU"}
"""What Ray calls a device of each kind."""

NODE_LABEL = "ray.io/node-id"
CHOSEN_S = 2.0
"""For Ray to find room on the node that was chosen."""

REMOVE_S = 1.0
"""For a group to be removed: one on a node that hangs waits for that node."""

IDS_S = 60.0
"""For the task that says which devices a bundle has: Ray may have to start a worker for it."""

Row = Mapping[str, Any]
"""A placement group, as Ray's table has it."""


class PlacementGroups(Reserver):
    """Of one deployment. `kind`: of its devices."""

    def __init__(self, deployment: str, kind: str) -> None:
        self._leases, self._wants = (f"{_prefix(deployment)}{what}/" for what in ("lease", "wanted"))
        self._resource = RESOURCES[kind]
        self._asked: Sequence[int] | None = None  # there may be some of a controller before this one
        self._removing: set[asyncio.Task[None]] = set()

    async def look(self, places: Mapping[str, Place]) -> tuple[Collection[str], Mapping[str, int]]:
        kept, others = set[str](), Counter[str]()
        for row in await asyncio.to_thread(_rows):
            if self._is_of(row, places):
                kept.add(self._lease(row))
            elif not row["name"].startswith(self._wants):  # nodes that have come for what is wanted are ours to lease
                for at, resources in row["bundles"].items():
                    others[row["bundles_to_node_id"].get(at) or ""] += int(resources.get(self._resource, 0))
        return kept, others

    async def reserve(
        self, lease: str, width: int, able: Sequence[str], within_s: float
    ) -> tuple[str, tuple[int, ...]]:
        await self.want((), ())
        until = time.monotonic() + within_s
        for nodes, wait_s in ((able[:1], CHOSEN_S), (able[1:], within_s)):
            if not nodes:
                continue
            name = f"{self._leases}{lease}/{secrets.token_hex(4)}"
            group = await self._group(name, width, f"in({','.join(nodes)})", lifetime="detached")
            if await asyncio.to_thread(group.wait, max(0.1, min(wait_s, until - time.monotonic()))):
                row = next((one for one in await asyncio.to_thread(_rows) if one["name"] == name), None)
                with contextlib.suppress(TimeoutError):  # it does not say which they are
                    if row is not None and (node := _node(row)):
                        return node, await self._ids(row, width)
            await self._remove([group])
        return "", ()

    async def keep(self, places: Mapping[str, Place]) -> None:
        rows = [row for row in await asyncio.to_thread(_rows) if row["name"].startswith(self._leases)]
        await self._remove(_group(row) for row in rows if not self._is_of(row, places))

    async def want(self, widths: Sequence[int], not_on: Collection[str]) -> None:
        if (asked := tuple(sorted(widths))) == self._asked:
            return
        names = {f"{self._wants}{width}/{at}": width for width, n in Counter(asked).items() for at in range(n)}
        there = {row["name"]: row for row in await asyncio.to_thread(_rows) if row["name"].startswith(self._wants)}
        await self._remove(_group(row) for name, row in there.items() if name not in names)
        for name in sorted(names.keys() - there.keys()):
            await self._group(name, names[name], f"!in({','.join(sorted(not_on))})" if not_on else "")
        self._asked = asked

    async def _group(self, name: str, width: int, on: str, **options: Any) -> PlacementGroup:
        """`on`: a selector of nodes, or "". `options`: of `placement_group`."""
        return await made(
            placement_group,
            [{self._resource: width}],
            strategy="STRICT_PACK",
            name=name,
            bundle_label_selector=[{NODE_LABEL: on}] if on else None,
            **options,
        )

    async def _ids(self, row: Row, count: int) -> tuple[int, ...]:
        """Which devices of its node the bundle has; of virtual ones nobody says it."""
        if self._resource == "CPU":
            return ()
        asking = ray.remote(_device_ids).options(
            num_cpus=0,
            **({"num_gpus": count} if self._resource == "GPU" else {"resources": {self._resource: count}}),
            scheduling_strategy=PlacementGroupSchedulingStrategy(_group(row), placement_group_bundle_index=0),
        )
        async with asyncio.timeout(IDS_S):
            ids: list[str] = await asking.remote(self._resource)
        return tuple(sorted(map(int, ids)))

    async def _remove(self, groups: Iterable[PlacementGroup]) -> None:
        """At once, but for those that wait for their node."""
        removing = asyncio.create_task(_removed(groups))
        self._removing.add(removing)
        removing.add_done_callback(self._removing.discard)
        await asyncio.wait([removing], timeout=REMOVE_S)

    def _lease(self, row: Row) -> str:
        return str(row["name"]).removeprefix(self._leases).split("/")[0]

    def _is_of(self, row: Row, places: Mapping[str, Place]) -> bool:
        """Whether it keeps one of these where that is."""
        place = places.get(self._lease(row)) if row["name"].startswith(self._leases) else None
        return place is not None and place.node != "" and place.node == _node(row)


async def release_all(deployment: str) -> None:
    """Whatever this deployment has reserved on the cluster."""
    rows = await asyncio.to_thread(_rows)
    await _removed(_group(row) for row in rows if row["name"].startswith(_prefix(deployment)))


def _prefix(deployment: str) -> str:
    """Of the names of all that it reserves."""
    return f"epd-serve/{deployment}/"


def _rows() -> list[Row]:
    """Of all that is reserved on the cluster."""
    return [row for row in placement_group_table().values() if row["state"] != "REMOVED"]


async def _removed(groups: Iterable[PlacementGroup]) -> None:
    for group in groups:
        await asyncio.to_thread(remove_placement_group, group)


def _group(row: Row) -> PlacementGroup:
    return PlacementGroup(ray.PlacementGroupID.from_hex(row["placement_group_id"]))


def _node(row: Row) -> str:
    """Where its bundle is; "" while it has no place."""
    return str(row["bundles_to_node_id"].get(0) or "") if row["state"] == "CREATED" else ""


def _device_ids(resource: str) -> list[str]:
    """In the bundle."""
    ids: list[str] = ray.get_runtime_context().get_accelerator_ids()[resource]
    return ids
