"""Layout notation: which stages run in which instances on which devices, in one line such as `(E-P)-D`.

    layout    := group ("-" group)*
    group     := "(" instance ("-" instance)* ")" repeat? | instance
    instance  := count? stages tp? repeat?          stages := E | P | D | EP | PD | ED | EPD
    count     := INT    tp := ":tp" INT    repeat := ("x" | "×") INT
    aliases   := "TP" N repeat?  = one monolith EPD:tpN on N devices (TP1x2 = two one-device monoliths)
               | group ("+" group)*           HydraInfer's "EP+D"   = EP-D
               | (INT stages tp?)+            HydraInfer's "1E3P4D" = E-3P-4D

`-` between groups: different devices. Parentheses: the members share one device, one process each. Adjacent
letters: one fused instance. A count or repeat of a bare instance takes that many devices (`2E` = two devices); a
count inside parentheses means that many processes on the shared device; `(…)x2` is the whole group twice.

This file owns the value and its canonical text: `parse(str(layout)) == layout`. The grammar is read in
`layout_parser.py`; what can serve, and on which devices, is decided in `placement.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from epd_serve.roles import Role

MAX_INSTANCES = 4096
"""More instances than this in one layout is a typing error, not a cluster."""


@dataclass(frozen=True)
class Member:
    """`count` equal instances of a group.

    Attributes:
        role: stages of each instance.
        tp: tensor-parallel width = devices of each instance.
        count: processes of this kind on the group's devices.
        position: offset of the stage letters in the text it was parsed from (for carets; not part of equality).
    """

    role: Role
    tp: int = 1
    count: int = 1
    position: int = field(default=0, compare=False)

    def __str__(self) -> str:
        return f"{self.count if self.count > 1 else ''}{self.role.value}{f':tp{self.tp}' if self.tp > 1 else ''}"


@dataclass(frozen=True)
class Group:
    """Members that share `tp` devices, `repeat` times over."""

    members: tuple[Member, ...]
    repeat: int = 1

    @property
    def tp(self) -> int:
        """Devices of one copy of the group. All members agree (the parser refuses mixed tp)."""
        return self.members[0].tp

    @property
    def device_count(self) -> int:
        return self.tp * self.repeat

    @property
    def instance_count(self) -> int:
        return self.repeat * sum(member.count for member in self.members)

    @property
    def colocates(self) -> bool:
        return self.instance_count > self.repeat

    def __str__(self) -> str:
        if not self.colocates:
            return str(replace(self.members[0], count=self.repeat))
        return f"({'-'.join(map(str, self.members))}){f'x{self.repeat}' if self.repeat > 1 else ''}"


@dataclass(frozen=True)
class Layout:
    """A parsed layout in canonical shape; make it with `layout_parser.parse` or `Layout.of`.

    Attributes:
        groups: in device order.
        spec: the text it came from, to which `Member.position` refers (not part of equality).
    """

    groups: tuple[Group, ...]
    spec: str = field(default="", compare=False)

    @classmethod
    def of(cls, groups: Iterable[Group], spec: str = "") -> Layout:
        """Canonical shape: equal neighbours merged (`E-E-P` = `2E-P`). Does not change who runs on which device."""
        merged: list[Group] = []
        for group in groups:
            group = Group(_merge(group.members), group.repeat)
            if merged and merged[-1].members == group.members:
                merged[-1] = replace(merged[-1], repeat=merged[-1].repeat + group.repeat)
            else:
                merged.append(group)
        return cls(tuple(merged), spec)

    @property
    def device_count(self) -> int:
        return sum(group.device_count for group in self.groups)

    @property
    def instance_count(self) -> int:
        return sum(group.instance_count for group in self.groups)

    @property
    def roles(self) -> frozenset[Role]:
        return frozenset(member.role for member in self.members())

    def members(self) -> Iterator[Member]:
        for group in self.groups:
            yield from group.members

    def __str__(self) -> str:
        return "-".join(map(str, self.groups))


def _merge(members: Iterable[Member]) -> tuple[Member, ...]:
    merged: list[Member] = []
    for member in members:
        if merged and (merged[-1].role, merged[-1].tp) == (member.role, member.tp):
            merged[-1] = replace(merged[-1], count=merged[-1].count + member.count)
        else:
            merged.append(member)
    return tuple(merged)
