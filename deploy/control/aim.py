"""From a layout's text to what is wanted: the deployment drawn again, and as much as can be left where it is.

Where devices are lent (`deploy/runtime/leases.py`), a layout is placed over those that are leased, those of instances
that will leave among them, and over free ones; what is lacking is leased before anything is begun. Who leaves keeps his
place until the change is over, and what nobody uses any more is given back then (`places.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from deploy.agent.specs import specs
from deploy.change.place import place
from deploy.change.types import Wanted
from deploy.control.refusals import RefusedError
from deploy.memory.placement_table import short_node
from deploy.plan.allot import Devices, allot, copies
from deploy.plan.blueprint import Blueprint, draw
from deploy.plan.machines import NOWHERE, Machine, Machines
from deploy.runtime.leases import LeaseError, Leases, Place
from deploy.runtime.protocol import Spec
from epd_serve.errors import ConfigError
from epd_serve.layout import Group, Layout
from epd_serve.layout_parser import parse


@dataclass(frozen=True)
class Lent:
    """Attributes:
    machines: the nodes that are known. places: that are leased. free: devices that could be leased now, by node.
    """

    machines: Machines
    places: Sequence[Place]
    free: Mapping[str, int]

    @property
    def there(self) -> list[Place]:
        """Places on nodes that are known; others wait."""
        known = {node.id for node in self.machines.nodes}
        return [one for one in self.places if one.node in known]

    @property
    def waiting(self) -> list[Place]:
        there = {one.lease for one in self.there}
        return [one for one in self.places if one.lease not in there]

    @property
    def pool(self) -> list[int]:
        """Devices that are leased."""
        return sorted(device for one in self.there for device in self.devices(one))

    def devices(self, place: Place) -> Devices:
        """Raises KeyError: its node is not known."""
        return self.machines.numbered(place.node, place.devices)

    def numbered(self, specs: Iterable[Spec]) -> list[Spec]:
        """Their devices by global id. Those on nodes that are not known have gone."""
        known = {node.id for node in self.machines.nodes}
        those = (spec for spec in specs if spec.node in known)
        return [replace(spec, devices=self.machines.numbered(spec.node, spec.devices)) for spec in those]

    def lacking(self, widths: Sequence[int]) -> LeaseError:
        """That places with so many devices each are not there."""
        free = {node.id: self.free.get(node.id, 0) for node in self.machines.nodes}
        return LeaseError(self.machines.kind, widths, free)

    def unleased(self) -> list[int]:
        """On each node as many devices as are said to be free there, by ids that nobody of ours has."""
        ours = set(self.pool)
        found = []
        for node in self.machines.nodes:
            others = [one for one in self.machines.numbered(node.id, node.inventory.ids) if one not in ours]
            found += others[: self.free.get(node.id, 0)]
        return found


class Aim:
    """Args:
    blueprint: of the launch: its options hold for every layout.
    leases: who lends the devices; None where all that were found are ours.

    Attributes:
    machines: the nodes there are. drawn: the latest drawing.
    """

    def __init__(self, blueprint: Blueprint, leases: Leases | None = None) -> None:
        self.machines = blueprint.machines
        self.leases = leases
        self.drawn = blueprint
        self._config = blueprint.config

    def first(self) -> Wanted:
        """What the launch was drawn as."""
        return Wanted(str(self.drawn.layout), specs(self.drawn), core_share=self._config.core_share)

    async def __call__(
        self, layout: str, running: Iterable[Spec], *, dry_run: bool = False, core_share: str | None = None
    ) -> Wanted:
        """What a layout wants, by the side of those that run.

        Args:
            dry_run: nothing is leased; free devices are as good as any others.
            core_share: where it is not that of the launch. A layout that has other names gets that of the launch.

        Raises:
            ConfigError, LayoutError: it cannot be served here, and why.
            LeaseError: there are not enough free devices. RefusedError: there are in a moment.
        """
        parsed, machines = parse(layout), self.machines
        if self.leases is None:
            return await self._drawn(parsed, machines, _here(parsed, machines, tuple(running)), core_share)
        await asyncio.to_thread(
            self._draw, parsed, machines, None, core_share
        )  # what else is wrong with it is said first
        lent = Lent(machines, await self.leases.places(), await self.leases.free())
        groups, lacking, free = _over(lent, parsed, running)
        found = free if dry_run or not lacking else await self._acquired(self.leases, lent, [tp for _, tp in lacking])
        for (at, _), devices in zip(lacking, found, strict=True):
            groups[at] = devices
        return await self._drawn(parsed, machines, groups, core_share)

    async def again(
        self,
        layout: str,
        running: Iterable[Spec],
        places: Sequence[Place] | None = None,
        *,
        core_share: str | None = None,
    ) -> Wanted:
        """What the layout that is wanted already wants now that nodes have gone or come, or by another controller.

        Who has no place, and gets none, waits.

        Args:
            running: those that stay where they are, as long as it is there. places: what is leased, if that is known.
            core_share: as of a call.
        """
        if self.leases is None:
            return await self(layout, running, core_share=core_share)
        parsed, machines = parse(layout), self.machines
        if places is None:
            places = await self.leases.places()
        lent = Lent(machines, places, await self.leases.free())
        groups = list(place(parsed, lent.pool, lent.numbered(running)))
        waits = [one.waits or f"node {short_node(one.node)} to join" for one in lent.waiting]
        coming = Counter(one.width for one in lent.waiting)
        for at, group in enumerate(copies(parsed)):
            if groups[at]:
                continue
            if coming[group.tp]:
                coming[group.tp] -= 1
                continue
            try:
                groups[at] = await self._one(self.leases, lent, group)
            except LeaseError as error:
                waits.append(error.lacks)
            except RefusedError as error:
                waits.append(error.message)
        return await self._drawn(parsed, machines, groups, core_share, waits="; ".join(dict.fromkeys(waits)))

    def has_moved(self, wanted: Wanted, places: Sequence[Place]) -> bool:
        """Somebody wanted is not on what is leased, or waits: it is to be aimed again."""
        there = _devices(Lent(self.machines, places, {}).there)
        return bool(wanted.waiting) or not there.issuperset(_where(wanted.specs))

    def unused(self, wanted: Wanted, used: Iterable[Spec], places: Sequence[Place]) -> list[str]:
        """Leases that may be given back: nothing that is wanted or used is on them, and nobody waits for them."""
        taken = _where([*used, *wanted.specs])
        waited = Lent(self.machines, places, {}).waiting if wanted.waiting else []
        return [one.lease for one in places if one not in waited and not taken & _devices([one])]

    # Leasing.

    async def _one(self, leases: Leases, lent: Lent, group: Group) -> Devices:
        """Raises LeaseError, RefusedError."""
        if not all(allot([group], lent.unleased())):  # do not ask, and wait, for what is not there
            raise lent.lacking([group.tp])
        (devices,) = await self._acquired(leases, lent, [group.tp])
        return devices

    async def _acquired(self, leases: Leases, lent: Lent, widths: Sequence[int]) -> Sequence[Devices]:
        """Raises LeaseError, RefusedError."""
        got = replace(lent, places=await leases.acquire(widths))
        if got.waiting:
            raise RefusedError(f"node {short_node(got.waiting[0].node)} has yet to join: try again", "node_joins")
        return [got.devices(one) for one in got.places]

    # Drawing.

    async def _drawn(
        self,
        layout: Layout,
        machines: Machines,
        groups: Sequence[Devices] | None,
        core_share: str | None,
        waits: str = "",
    ) -> Wanted:
        """`groups`: devices of each, () for those that have none; None where `draw` chooses, or says what is wrong."""
        self.drawn = await asyncio.to_thread(self._draw, layout, machines, groups, core_share)
        every = specs(self.drawn)
        placed, waiting = (tuple(one for one in every if (one.node == NOWHERE) is no) for no in (False, True))
        return Wanted(str(layout), placed, waiting, waits if waiting else "", self.drawn.config.core_share)

    def _draw(
        self, layout: Layout, machines: Machines, groups: Sequence[Devices] | None, core_share: str | None
    ) -> Blueprint:
        config, devices = replace(self._config, layout=str(layout)), None
        if groups is not None:
            widths = [group.tp for group in copies(layout)]
            if homeless := sum(width for width, some in zip(widths, groups, strict=True) if not some):
                machines = Machines((*machines.nodes, _nowhere(machines.nodes[0], homeless)))
            left = iter(machines.numbered(NOWHERE, range(homeless)) if homeless else ())
            given = (some or tuple(next(left) for _ in range(tp)) for tp, some in zip(widths, groups, strict=True))
            devices = [device for some in given for device in some]
        if core_share is not None and core_share != config.core_share:
            with contextlib.suppress(ConfigError):  # what is wrong with anything else is said below
                return draw(replace(config, core_share=core_share), machines=machines, devices=devices)
        return draw(config, machines=machines, devices=devices)


def _here(layout: Layout, machines: Machines, running: Sequence[Spec]) -> Sequence[Devices] | None:
    """None where there are too few devices: `draw` says so, or shares them."""
    inventory = machines.inventory
    pool: Sequence[int] = inventory.ids
    if inventory.kind == "cpu":  # virtual ones, as many as are asked for
        highest = max((device for spec in running for device in spec.devices), default=-1)
        pool = range(max(layout.device_count, highest + 1))
    return place(layout, pool, running) if len(pool) >= layout.device_count else None


def _over(
    lent: Lent, layout: Layout, running: Iterable[Spec]
) -> tuple[list[Devices], list[tuple[int, int]], tuple[Devices, ...]]:
    """A layout over what is leased and what is free: rather on free devices than on those of somebody who has to go
    first, where there are enough.

    Returns:
        Devices of each group, () for those that lack some; position and width of these; and free devices for them.

    Raises:
        LeaseError: what is free is not enough either.
    """
    stay = lent.numbered(running)
    wide = copies(layout)
    missing: list[int] = []
    for beside_leaving in (False, True):
        groups = list(place(layout, lent.pool, stay, beside_leaving=beside_leaving))
        lacking = [(at, wide[at].tp) for at, devices in enumerate(groups) if not devices]
        free = allot([wide[at] for at, _ in lacking], lent.unleased())
        missing = [width for (_, width), devices in zip(lacking, free, strict=True) if not devices]
        if not missing:
            return groups, lacking, free
    raise lent.lacking(missing)


def _nowhere(like: Machine, count: int) -> Machine:
    """A node that there is not, whose devices are like those of another."""
    properties = like.properties
    if properties and like.inventory.kind != "cpu":
        properties = tuple(replace(properties[0], index=device, users=()) for device in range(count))
    inventory = replace(like.inventory, ids=tuple(range(count)), names=("",) * count)
    return replace(like, id=NOWHERE, inventory=inventory, properties=properties, doubts=())


def _where(those: Iterable[Spec]) -> set[tuple[str, int]]:
    return {(spec.node, device) for spec in those for device in spec.devices}


def _devices(places: Iterable[Place]) -> set[tuple[str, int]]:
    return {(one.node, device) for one in places for device in one.devices}
