"""A layout's text with other numbers of instances."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from epd_serve.errors import ConfigError
from epd_serve.layout import Group, Layout, Member
from epd_serve.layout_parser import parse
from epd_serve.roles import Role


def scaled(text: str, counts: Mapping[Role, int], *, switchable: bool = False) -> str:
    """The layout with so many instances of these roles. Bare instances are added and taken at the end; groups in
    parentheses stay.

    Args:
        switchable: P and D may become each other, where one has too many and the other too few.

    Raises:
        ConfigError: fewer than stand in parentheses, or fewer than none.
        LayoutError: `text` is no layout.
    """
    layout = parse(text)
    groups = [replace(group, repeat=1) for group in layout.groups for _ in range(group.repeat)]
    there = Counter(member.role for group in groups for member in group.members for _ in range(member.count))
    wanting = {role: count - there[role] for role, count in counts.items()}
    for role, count in counts.items():
        together = sum(m.count for group in groups if group.colocates for m in group.members if m.role is role)
        if count < together:
            raise ConfigError(
                f"{role.value}={count}: {layout} has {together} in parentheses; write the layout you want: "
                "epd-serve relayout SPEC",
                param=role.value,
            )
    if switchable:
        _recast(groups, wanting)
    for role, more in wanting.items():
        alone = [at for at, group in enumerate(groups) if _is_alone(group, role)]
        if more < 0:
            for at in reversed(alone[more:]):
                del groups[at]
        else:
            groups += [groups[alone[-1]] if alone else Group((Member(role),))] * more
    return str(Layout.of(groups))


def _recast(groups: list[Group], wanting: dict[Role, int]) -> None:
    """Of P and D, those that one has too many of, from the end, become the other."""
    for role, other in ((Role.P, Role.D), (Role.D, Role.P)):
        for at in reversed(range(len(groups))):
            if _is_alone(groups[at], role) and wanting.get(role, 0) < 0 < wanting.get(other, 0):
                groups[at] = Group((replace(groups[at].members[0], role=other),))
                wanting[role] += 1
                wanting[other] -= 1


def _is_alone(group: Group, role: Role) -> bool:
    return not group.colocates and group.members[0].role is role
