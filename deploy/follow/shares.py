"""Core shares of stages that share a device: how they should divide its cores for the work that comes. Pure.

The cheapest move: seconds, no start, no other layout. Cores go from a part that has some to spare to one that is busier
than it may be, in proportion to what both have to do; a part is taken to be as many times faster as it has cores, and
one that decodes, which waits for memory, keeps what it takes to use the bandwidth (`epd_serve.core_shares`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from deploy.follow.moves import GAIN, counts_of
from deploy.follow.types import Limits, Move, Needs, Observation, Shares, part_of
from epd_serve.core_shares import DECODE_SHARE, LEAST_SHARE
from epd_serve.roles import Role

FINE = 100
"""Parts that a device is divided into where nobody knows how many cores it has."""


@dataclass(frozen=True)
class Held:
    """A stage that is held to a share.

    Attributes:
        device: on which it is, with the others of this copy of its group. share: that it was given.
        cores: how many it has; 0 where nobody here knows.
    """

    group: str
    role: Role
    device: Hashable
    share: float
    cores: int = 0


def shares_of(held: Iterable[Held]) -> Mapping[str, Shares]:
    """Of each group whose shares can be changed by role: all copies of it divide their devices alike, and none of its
    roles shares a device in another group."""
    by_group: dict[str, list[Held]] = {}
    for one in held:
        by_group.setdefault(one.group, []).append(one)
    found = {}
    for group, stages in by_group.items():
        given = {one.role: one.share for one in stages}
        others = {one.role for name, some in by_group.items() if name != group for one in some}
        if not others & given.keys() and all(given[one.role] == one.share for one in stages):
            found[group] = min(_of_each_device(stages), key=lambda one: one.cores)
    return found


def _of_each_device(stages: Iterable[Held]) -> Iterator[Shares]:
    """As whole cores have it. Cores that shares leave idle on purpose count as the device's."""
    devices: dict[Hashable, list[Held]] = {}
    for one in stages:
        devices.setdefault(one.device, []).append(one)
    for some in devices.values():
        cores = round(sum(one.cores for one in some) / sum(one.share for one in some)) or FINE
        counts = Counter(one.role for one in some)
        of = {
            role: sum(one.cores / cores or one.share for one in some if one.role is role) / counts[role]
            for role in counts
        }
        yield Shares(of, counts, cores)


def propose_shares(seen: Observation, need: Needs, limits: Limits) -> Iterator[Move]:
    """For each group one of whose parts would be busier than it may be, a division that relieves it.

    Args:
        need: group-seconds a second, by part.
    """
    counts = counts_of(seen.layout)
    for group, now in seen.shares.items():
        busy = {role: need.get(part_of(group, role), 0.0) / limits.use / counts[group] for role in now.of}
        role = max(busy, key=lambda one: busy[one])
        if busy[role] <= 1:
            continue
        cores = divided(now, {one: busy[one] * now.part(one) for one in busy})
        after = max(busy[one] * now.part(one) * now.cores / cores[one] for one in busy)
        if busy[role] < GAIN * after:
            continue
        to = {one: cores[one] / now.counts[one] / now.cores for one in cores}
        before = round(now.part(role) * now.cores)
        why = f"{role.value} would be used {busy[role] * limits.use:.0%} of its time with {before} of {now.cores} cores"
        yield Move(
            "share",
            str(seen.layout),
            counts,
            part_of(group, role),
            busy[role],
            after,
            f"{why}, and gets {cores[role]}",
            text_of({**seen.shares, group: Shares(to, now.counts, now.cores)}),
        )


def divided(now: Shares, work: Mapping[Role, float]) -> dict[Role, int]:
    """Cores of a device for each role, as many in all as now: one after another to whose part would be busiest."""
    had = {role: round(now.part(role) * now.cores) for role in now.of}
    cores = {role: min(had[role], _least(role, now)) for role in now.of}
    while sum(cores.values()) < sum(had.values()):
        cores[max(cores, key=lambda role: work[role] / cores[role])] += 1
    return cores


def _least(role: Role, now: Shares) -> int:
    share = DECODE_SHARE if role.decodes else LEAST_SHARE
    return max(1, round(share * now.cores)) * now.counts[role]


def text_of(shares: Mapping[str, Shares]) -> str:
    """As `--core-share` has it. Exact: whole cores come out of it as whole ones."""
    return ",".join(f"{role.value}={share:.12g}" for one in shares.values() for role, share in one.of.items())
