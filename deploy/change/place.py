"""Which devices a layout's groups get, so that as much as can be stays where it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from deploy.plan.allot import Devices, allot, copies
from deploy.runtime.protocol import Spec
from epd_serve.layout import Group, Layout
from epd_serve.roles import Role


def place(
    layout: Layout, pool: Sequence[int], running: Iterable[Spec], *, beside_leaving: bool = True
) -> tuple[Devices, ...]:
    """Devices of each copy of the layout's groups, in its order; () for one that finds no room.

    Args:
        pool: global ids that may be used. Where nobody is, nobody has to go first: those are taken before others.
        running: what runs now, its devices by global id. P and D with both halves count as each other.
        beside_leaving: devices of those that do not stay may be given to others.
    """
    there: dict[Devices, list[Spec]] = {}
    for spec in running:
        if set(spec.devices) <= set(pool):
            there.setdefault(spec.devices, []).append(spec)
    groups = copies(layout)
    kept = [(_in_common(group, some), index, at) for index, group in enumerate(groups) for at, some in there.items()]
    chosen: dict[int, Devices] = {}
    taken: set[int] = set()
    for (stay, _), index, at in sorted(kept, key=lambda one: (-one[0][0], -one[0][1], one[1:])):
        if stay and index not in chosen and len(at) == groups[index].tp and not taken & set(at):
            chosen[index] = at
            taken |= set(at)
    occupied = {device for at in there for device in at}
    left = [device for device in pool if device not in taken]
    free = [device for device in left if device not in occupied]
    in_use = [device for device in left if device in occupied] if beside_leaving else []
    return allot(groups, free, in_use, chosen)


def _in_common(group: Group, there: Sequence[Spec]) -> tuple[int, int]:
    """How many of the group's instances are there already, flips counted; and how many of them without a flip."""
    roles = Counter(member.role for member in group.members for _ in range(member.count))
    same = roles & Counter(spec.role for spec in there)
    left = roles - same
    others = Counter(_other(spec.role) for spec in there if spec.both) - Counter(
        _other(role) for role in same.elements()
    )
    return same.total() + (left & others).total(), same.total()


def _other(role: Role) -> Role:
    return {Role.P: Role.D, Role.D: Role.P}.get(role, role)
