"""What is leased and what is free at one moment, under the global ids of one set of nodes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from deploy.plan.allot import Devices
from deploy.plan.machines import Machines
from deploy.runtime.leases import LeaseError, Place
from deploy.runtime.protocol import Spec


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
