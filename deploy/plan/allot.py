"""Which devices of which nodes the groups of a layout get. Pure.

A group is on one node: its members share devices, and tensor-parallel ranks talk too much for a network. Who hands
features or KV to whom is on one node where that costs nothing, for within a node these go through memory.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import islice
from types import MappingProxyType

from deploy.plan.machines import node_index
from epd_serve.layout import Group, Layout
from epd_serve.roles import Role

Devices = tuple[int, ...]
"""Global ids, in rank order."""


def copies(layout: Layout) -> list[Group]:
    """Each group as often as it is repeated, in the layout's order."""
    return [group for group in layout.groups for _ in range(group.repeat)]


def allot(
    groups: Sequence[Group],
    free: Sequence[int],
    in_use: Sequence[int] = (),
    kept: Mapping[int, Devices] = MappingProxyType({}),
) -> tuple[Devices, ...]:
    """Devices of each group, () for one that finds no room.

    Wide groups choose their nodes first. Widths are powers of two in practice, and then no other choice of nodes would
    find room for all where this one does not.

    Args:
        free: global ids that may be given; on each node, in this order. in_use: that are given where none of these are
            left.
        kept: what groups have already, by position.
    """
    fresh, left = (Counter(map(node_index, ids)) for ids in (free, (*free, *in_use)))
    there: defaultdict[int, Counter[Role]] = defaultdict(Counter)
    nodes = {at: node_index(devices[0]) for at, devices in kept.items()}
    for at, node in nodes.items():
        there[node] += _roles(groups[at])
    for at in _turns(groups):
        if at in kept:
            continue
        width, roles = groups[at].tp, _roles(groups[at])
        fitting = [node for node in left if left[node] >= width]
        if fitting:
            node = max(fitting, key=lambda node: (min(width, fresh[node]), _meetings(roles, there[node]), left[node]))
            nodes[at] = node
            fresh[node] -= min(width, fresh[node])
            left[node] -= width
            there[node] += roles
    rows = {node: iter([one for one in (*free, *in_use) if node_index(one) == node]) for node in left}
    return tuple(
        kept[at] if at in kept else tuple(islice(rows[nodes[at]], group.tp)) if at in nodes else ()
        for at, group in enumerate(groups)
    )


def _turns(groups: Sequence[Group]) -> list[int]:
    """Positions, the widest groups first, and of those as wide the first of each kind, then the second of each: who
    exchange KV take turns, and so meet."""
    number = Counter[object]()
    turns = []
    for at, group in enumerate(groups):
        turns.append((-group.tp, number[group.members], at))
        number[group.members] += 1
    return [at for *_, at in sorted(turns)]


def _roles(group: Group) -> Counter[Role]:
    return Counter({member.role: member.count for member in group.members})


def _meetings(roles: Counter[Role], others: Counter[Role]) -> int:
    """Pairs of one of these and one of those in which one hands something to the other."""
    return sum(
        count * others[other]
        for one, count in roles.items()
        for other in others
        if _hands_to(one, other) or _hands_to(other, one)
    )


def _hands_to(one: Role, other: Role) -> bool:
    return (one.sends_kv and other.takes_kv) or (one.sends_features and other.takes_features)
