"""Which devices a layout's groups get, so that as much as can be stays where it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from deploy.runtime.protocol import Spec
from epd_serve.errors import ConfigError
from epd_serve.layout import Group, Layout
from epd_serve.roles import Role


def place(layout: Layout, pool: Sequence[int], running: Iterable[Spec]) -> tuple[int, ...]:
    """Devices in the layout's order, for `epd_serve.placement.lower`.

    Args:
        pool: ids that may be used.
        running: what runs now. P and D with both halves count as each other.

    Raises:
        ConfigError: the pool has too few.
    """
    if layout.device_count > len(pool):
        raise ConfigError(f"layout {layout} needs {layout.device_count} devices, there are {len(pool)}", param="layout")
    there: dict[tuple[int, ...], list[Spec]] = {}
    for spec in running:
        if set(spec.devices) <= set(pool):
            there.setdefault(spec.devices, []).append(spec)
    copies = [group for group in layout.groups for _ in range(group.repeat)]
    kept = [(_in_common(group, some), index, at) for index, group in enumerate(copies) for at, some in there.items()]
    chosen: dict[int, tuple[int, ...]] = {}
    taken: set[int] = set()
    for (stay, _), index, at in sorted(kept, key=lambda one: (-one[0][0], -one[0][1], one[1:])):
        if stay and index not in chosen and len(at) == copies[index].tp and not taken & set(at):
            chosen[index] = at
            taken |= set(at)
    unused = [device for device in pool if device not in taken]
    unused.sort(key=lambda device: any(device in at for at in there))  # where nobody is, nobody has to go first
    free = iter(unused)
    devices = (chosen.get(index) or tuple(next(free) for _ in range(group.tp)) for index, group in enumerate(copies))
    return tuple(device for some in devices for device in some)


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
