"""The nodes that a deployment is drawn for, as each tells of itself before anything of ours runs on it.

Within a drawing a device has one number whichever node it is on (its global id), so that whoever shares one is found by
comparing numbers. Whoever is told to run somewhere is told a node, and the number that the device has there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from deploy.memory.check import OneStage, Outcome, share_memory
from deploy.memory.placement_table import short_node
from deploy.memory.plan import MemoryPlan
from deploy.options.stage_args import StageArgs
from epd_serve.errors import ConfigError
from epd_serve.model_facts import ModelFacts
from epd_serve.placement import InstancePlan
from npu_ops.core_sets import CoreSets, core_sets
from npu_ops.discovery import DeviceInventory, DiscoveryError, discover
from npu_ops.properties import DeviceProperties, read_properties

HERE = "local"
"""The id of the one node of a deployment that has no other."""

NOWHERE = ""
"""The id of a node that there is not, with devices for those who have to wait for a place."""

_LOCAL_BITS = 12


def node_index(device: int) -> int:
    """Position in `Machines.nodes` of the node that has the device with this global id."""
    return device >> _LOCAL_BITS


@dataclass(frozen=True)
class Machine:
    """One node. Plain data: it may be written down and read again (`msgspec.json`).

    Attributes:
        id: as its runtime calls it.
        inventory: its devices under its own numbers. On CPU, where devices are virtual: as many as it lends, or none
            for as many as anybody asks for.
        properties: of the devices, from before stages of ours were on them. None: this machine, not asked yet.
        cores: ids of the CPU cores that its stages may use; empty for those of this process.
        cann: numbers of its CANN's version; empty: none, or unknown.
        doubts: what is wrong with it, a line each. None: this machine, not looked at yet.
    """

    id: str
    inventory: DeviceInventory
    properties: tuple[DeviceProperties, ...] | None = None
    cores: tuple[int, ...] = ()
    cann: tuple[int, ...] = ()
    doubts: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Machines:
    """All of one kind, in an order that gives their devices global ids; nothing else depends on it."""

    nodes: tuple[Machine, ...]

    @classmethod
    def here(cls, kind: str) -> Machines:
        """This machine alone, whose devices have the same number everywhere.

        Args:
            kind: `auto`, `npu`, `cuda` or `cpu`.

        Raises:
            ConfigError: the operator's list of visible devices names one that is not there.
        """
        try:
            return cls((Machine(HERE, discover(kind)),))
        except DiscoveryError as error:
            raise ConfigError(str(error), param="--device") from error

    @classmethod
    def of(cls, nodes: Iterable[Machine]) -> Machines:
        """Several. Raises ConfigError where there are none, or their devices are of different kinds."""
        known = tuple(sorted(nodes, key=lambda node: node.id))
        kinds = {node.inventory.kind for node in known}
        if len(kinds) != 1:
            told = ", ".join(f"{short_node(node.id)}: {node.inventory.kind}" for node in known) or "none"
            raise ConfigError(f"a deployment takes nodes with one kind of devices; there are {told}", param="--device")
        return cls(known)

    @property
    def kind(self) -> str:
        return self.nodes[0].inventory.kind

    @property
    def several(self) -> bool:
        return sum(node.id != NOWHERE for node in self.nodes) > 1

    @property
    def inventory(self) -> DeviceInventory:
        """Of all of them, under global ids."""
        rows = [(index, node.inventory) for index, node in enumerate(self.nodes)]
        return replace(
            rows[0][1],
            ids=tuple(_global(index, device) for index, one in rows for device in one.ids),
            names=tuple(name for _, one in rows for name in one.names),
            note="; ".join(filter(None, (one.note for _, one in rows))),
        )

    def at(self, node: str) -> Machine:
        """Raises KeyError."""
        return self.nodes[self._index(node)]

    def numbered(self, node: str, devices: Iterable[int]) -> tuple[int, ...]:
        """Global ids of a node's devices. Raises KeyError."""
        index = self._index(node)
        return tuple(_global(index, device) for device in devices)

    def local(self, devices: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        """Whose the devices of one instance are, and their numbers there."""
        (index,) = {node_index(device) for device in devices}
        return self.nodes[index].id, tuple(device - _global(index, 0) for device in devices)

    def described(self, devices: Sequence[int]) -> str:
        """For people: `0,1`, and `b:0,1` where there are several nodes."""
        node, numbers = self.local(devices)
        return f"{short_node(node)}:" * self.several + ",".join(map(str, numbers))

    def split(self, plans: Iterable[InstancePlan]) -> list[tuple[Machine, tuple[InstancePlan, ...]]]:
        """The instances of each node that has any, with the numbers that their devices have there."""
        by_node: dict[int, list[InstancePlan]] = {}
        for plan in plans:
            own = replace(plan, devices=self.local(plan.devices)[1])
            by_node.setdefault(node_index(plan.devices[0]), []).append(own)
        return [(self.nodes[index], tuple(own)) for index, own in sorted(by_node.items())]

    def asked(self) -> Machines:
        """With the properties of this machine's devices, where nobody has asked for them yet."""
        return Machines(
            tuple(
                node if node.properties is not None else replace(node, properties=read_properties(node.inventory))
                for node in self.nodes
            )
        )

    def core_sets(self, devices: Iterable[int]) -> CoreSets:
        """Cores of virtual devices, these among them. A node's cores are divided among as many as it lends, or as the
        highest number on it says."""
        used, sets, oversubscribed = set(devices), dict[int, tuple[int, ...]](), False
        for index, node in enumerate(self.nodes):
            own = [device - _global(index, 0) for device in used if node_index(device) == index]
            count = max((*own, len(node.inventory.ids) - 1), default=-1) + 1
            if count > 0:
                divided = core_sets(count, node.cores or None)
                sets |= {_global(index, device): cores for device, cores in divided.sets.items()}
                oversubscribed |= divided.oversubscribed
        return CoreSets(sets, oversubscribed)

    def _index(self, node: str) -> int:
        for index, one in enumerate(self.nodes):
            if one.id == node:
                return index
        raise KeyError(f"there is no node {node}")


def _global(index: int, device: int) -> int:
    return index << _LOCAL_BITS | device


def share_memory_of_nodes(
    plans: Sequence[InstancePlan],
    facts: ModelFacts | None,
    machines: Machines,
    words: StageArgs | OneStage,
    *,
    shm_mib: Callable[[Sequence[InstancePlan]], int],
    slab_bytes: int | None = 0,
) -> Outcome:
    """As `deploy.memory.check.share_memory`; with several nodes, what is said names the node.

    Args:
        machines: with the properties of their devices. shm_mib: of host memory, for all instances of a node.
        slab_bytes: see `Sizing`.

    Raises:
        ConfigError: what does not fit, and where.
    """
    outcomes = []
    for machine, own in machines.split(plans):
        where = f"node {short_node(machine.id)}: " * machines.several
        try:
            one = share_memory(
                own,
                facts,
                machine.inventory,
                words,
                shm_mib=shm_mib(own),
                slab_bytes=slab_bytes,
                properties=machine.properties,
            )
        except ConfigError as error:
            raise ConfigError(f"{where}{error.message}", param=error.param) from error
        plan = one.plan and replace(
            one.plan,
            groups=tuple(replace(group, node=short_node(machine.id) * machines.several) for group in one.plan.groups),
        )
        outcomes.append(replace(one, plan=plan, warnings=tuple(f"{where}{line}" for line in one.warnings)))
    known = [one.plan for one in outcomes if one.plan is not None]
    whole = MemoryPlan(machines.kind, tuple(group for plan in known for group in plan.groups))
    return Outcome(
        grants={name: grant for one in outcomes for name, grant in one.grants.items()},
        plan=whole if len(known) == len(outcomes) else None,
        warnings=tuple(dict.fromkeys(line for one in outcomes for line in one.warnings)),
    )
