"""Layouts that might serve traffic best, and how much each can at most. Pure.

The families are those of the papers: monoliths, an encoder apart, prefill and decode apart, all three apart, and stages
that share a device. Within a family all splits of the devices are looked at; which of them is worth simulating follows
from an upper bound, the rate at which its busiest stage has no time left. The split that is best by it is the one whose
shares are proportional to the stages' work (HydraInfer §4.4, Algorithm 2), so nothing has to be searched for at random.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from deploy.planner.profile import DECODE, ENCODE, KINDS, PREFILL, DeviceProfile
from deploy.planner.workload import Work
from epd_serve.budgets import largest
from epd_serve.layout import Group, Layout, Member
from epd_serve.layout_parser import parse
from epd_serve.roles import Role
from epd_serve.sim.profile import Profile

FAMILIES: tuple[tuple[str, ...], ...] = (
    ("EPD",),
    ("E", "PD"),
    ("(E-PD)",),
    ("(E-PD)", "PD"),
    ("EP", "D"),
    ("P", "D"),
    ("(E-P)", "D"),
    ("(E-D)", "P"),
    ("(E-P-D)",),
    ("E", "P", "D"),
)
"""Groups of equal devices."""
TEXT_ALONE = (("P", "D"),)
IMAGES_TOO = tuple(family for family in FAMILIES if family not in (("EPD",), ("P", "D"), ("(E-P-D)",)))
"""Families that are no others without images, or with them: nobody encodes text, and P encodes as EP does."""
BEHIND_ENCODERS = tuple(family for family in FAMILIES if any("E" in group.strip("()").split("-") for group in family))
"""Families in which nobody but an E encodes."""
PARTS = 12
"""Into which many devices are cut, at least: a split of 64 need not be right to a device."""
COMMON = 0.9
"""Of a device's memory, that weights and KV have."""


@dataclass(frozen=True)
class Candidate:
    """A layout. `bound_rps`: no more requests a second can it serve."""

    layout: Layout
    bound_rps: float

    @property
    def monolith(self) -> bool:
        return self.layout.roles == {Role.EPD}


def candidates(devices: int, profile: DeviceProfile, work: Work, *, more: int = 2) -> list[Candidate]:
    """Of each family the split that can serve most, and so many `more` of it that come next; best bound first. With all
    tensor-parallel sizes of the profile."""
    unit = max((one for one in range(1, devices // PARTS + 1) if devices % one == 0), default=1)
    kept: dict[str, Candidate] = {}
    for family in BEHIND_ENCODERS if profile.encoder_free else FAMILIES:
        if family in (TEXT_ALONE if work.items else IMAGES_TOO):
            continue
        found = sorted(_family(family, devices // unit, unit, profile, work), key=lambda one: -one.bound_rps)
        kept |= {str(one.layout): one for one in found[: 1 + more]}
    return sorted(kept.values(), key=lambda one: -one.bound_rps)


def _family(family: Sequence[str], devices: int, unit: int, profile: DeviceProfile, work: Work) -> Iterator[Candidate]:
    """All splits of so many devices, each group `unit` times as often."""
    for sizes in itertools.product(sorted(profile.stages), repeat=len(family)):
        for counts in _splits(devices, sizes):
            groups = [_group(name, tp, count * unit) for name, tp, count in zip(family, sizes, counts, strict=True)]
            if all(fits(group, profile) for group in groups):
                yield candidate(Layout.of(groups), profile, work)


def candidate(layout: Layout, profile: DeviceProfile, work: Work) -> Candidate:
    return Candidate(parse(str(layout)), bound_rps(layout, profile, work))


def _splits(devices: int, sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """How often each group can be there, at least once, so that all devices are used."""
    if len(sizes) == 1:
        if devices % sizes[0] == 0 and devices:
            yield (devices // sizes[0],)
        return
    for count in range(1, devices // sizes[0] + 1):
        for rest in _splits(devices - count * sizes[0], sizes[1:]):
            yield (count, *rest)


def _group(name: str, tp: int, count: int) -> Group:
    roles = name.strip("()").split("-")
    return Group(tuple(Member(Role(role), tp) for role in roles), count)


def fits(group: Group, profile: DeviceProfile) -> bool:
    """Whether the weights of its stages leave room on their device; yes where the profile does not say."""
    if not profile.memory_bytes:
        return True
    weights = [profile.weight_bytes.get(one.role.value, {}).get(group.tp, 0) * one.count for one in group.members]
    return sum(weights) < COMMON * profile.memory_bytes


def batch_within(stage: Profile, kv_tokens: float, tpot_s: float) -> int:
    """How many may decode at once for a step to be no longer than that; 0 where one alone takes longer."""
    return largest(lambda size: stage.decode_s(size, size * kv_tokens) <= tpot_s, stage.capacity.max_running)


def seconds_of(profile: DeviceProfile, tp: int, work: Work, tpot_s: float | None = None) -> Mapping[str, float]:
    """Of a device's time, what a request takes of each kind of work where batches are as large as they can be. With
    `tpot_s`, as large as they may be for a step to be no longer than that; and of decoding no less than the request's
    share of the KV, which it has from before its prefill to its last token."""
    stage, steps = profile.stages[tp], max(0.0, work.output_tokens - 1)
    batch = stage.capacity.max_running
    if tpot_s is not None:
        batch = max(1, batch_within(stage, work.prompt_tokens, tpot_s))
    item = work.item_tokens / work.items if work.items else 0.0
    prefill_s = stage.prefill.seconds(work.prompt_tokens) + stage.prefill_context_s * work.prompt_tokens**2 / 2
    decode_s = steps * stage.decode_s(batch, batch * work.prompt_tokens) / batch
    if tpot_s is not None:
        fit = min(batch, max(1, int(stage.capacity.kv_tokens / max(1.0, work.prompt_tokens + work.output_tokens))))
        held_s = prefill_s + steps * stage.decode_s(fit, fit * work.prompt_tokens)
        decode_s = max(decode_s, held_s / fit) if fit < batch else decode_s
    return {ENCODE: work.items * stage.encode.seconds(item), PREFILL: prefill_s, DECODE: decode_s}


def bound_rps(layout: Layout, profile: DeviceProfile, work: Work) -> float:
    """Requests a second at which the devices that share some kinds of work among them have no time left; stages on one
    device take what their slowdown leaves of running side by side."""
    apart = any(member.role is Role.E for member in layout.members())
    rate_rps = math.inf
    for kinds, groups in _together(layout, apart=apart):
        taken_s = 0.0
        for group in groups:  # each a share, by its devices
            seconds = seconds_of(profile, group.tp, work)
            own = [kinds_of(member.role, apart=apart) for member in group.members for _ in range(member.count)]
            whole = {kind for each in own for kind in each} == kinds
            needs_s = _side_by_side(own, seconds, profile) if whole else sum(seconds[kind] for kind in kinds)
            taken_s += group.repeat / sum(one.repeat for one in groups) * needs_s
        if taken_s > 0:
            rate_rps = min(rate_rps, sum(group.repeat for group in groups) / taken_s)
    for kind in KINDS[1:]:
        able = [
            group for group in layout.groups if any(kind in kinds_of(one.role, apart=apart) for one in group.members)
        ]
        rates = [(group.repeat, seconds_of(profile, group.tp, work)[kind]) for group in able]
        if rates and all(s > 0 for _, s in rates):
            rate_rps = min(rate_rps, sum(count / s for count, s in rates))
    return rate_rps


def _together(layout: Layout, *, apart: bool) -> list[tuple[set[str], list[Group]]]:
    """Groups by the kinds of work that they share, directly or through others."""
    parts: list[tuple[set[str], list[Group]]] = []
    for group in layout.groups:
        kinds = {kind for member in group.members for kind in kinds_of(member.role, apart=apart)}
        groups = [group]
        for other in [part for part in parts if part[0] & kinds]:
            parts.remove(other)
            kinds |= other[0]
            groups += other[1]
        parts.append((kinds, groups))
    return parts


def kinds_of(role: Role, *, apart: bool) -> tuple[str, ...]:
    """Kinds of work that a role does; `apart`: encoders do what E stands for."""
    return tuple(
        kind
        for kind, does in (
            (ENCODE, role is Role.E or (not apart and role.value in ("EPD", "EP", "P", "PD"))),
            (PREFILL, role.value in ("EPD", "EP", "P", "PD")),
            (DECODE, role.value in ("EPD", "D", "PD")),
        )
        if does
    )


def _side_by_side(own: Iterable[Sequence[str]], seconds: Mapping[str, float], profile: DeviceProfile) -> float:
    """Seconds of a device for one request, all of its stages together."""
    total_s = 0.0
    before: list[str] = []
    for kinds in own:
        mine_s = sum(seconds[kind] for kind in kinds)
        overlap = 0.0
        for kind, other in itertools.product(kinds, before):
            gained = 2.0 - min(2.0, profile.slows(kind, other))  # 1: none of it is felt, 0: they take turns
            overlap = max(overlap, gained * min(seconds[kind], seconds[other]))
        total_s += mine_s - overlap
        before += kinds
    return total_s
