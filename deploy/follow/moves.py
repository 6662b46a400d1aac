"""From what is needed to another layout, and what forbids it. Pure.

Out at once, by what is needed now; in only by the most that was needed for a while, and with room to spare (ModServe
§4.2); where devices are short, what is there goes to whom it helps most, text's own share first, so that a burst of
images starves no text. P and D of a switchable deployment rather become each other than start.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from deploy.follow.types import Counts, Limits, Memory, Move, Needs, Observation
from epd_serve.layout import Group, Layout
from epd_serve.layout_parser import parse
from epd_serve.roles import Role

ROOM = 0.8
"""Of what a group may be used, that may be needed once some of it was given up."""
GAIN = 1.15
"""Who must wait anyway is to wait less by so much, or nothing is moved."""
TRADE_S = 30.0
"""For so long a group that gave something up to another one does not get it back, unless more is needed of it."""
SHARE_S = 30.0
"""From one change of core shares to the next: until then reports still tell of what was before it."""
HALF = 0.5
"""Of the devices, that are text's first."""
HEARD = 0.5
"""Of the front doors: what fewer say is not gone by."""


@functools.lru_cache(maxsize=256)
def name_of(group: Group) -> str:
    """A copy of it; asked for all copies at each look."""
    return str(replace(group, repeat=1))


def counts_of(layout: Layout) -> Counter[str]:
    counts: Counter[str] = Counter()
    for group in layout.groups:
        counts[name_of(group)] += group.repeat
    return counts


def other_half(name: str) -> str:
    """The group that one of these can become where P and D are switchable; "" where there is none."""
    group = parse(name).groups[0]
    if group.colocates or group.members[0].role not in (Role.P, Role.D):
        return ""
    role = Role.D if group.members[0].role is Role.P else Role.P
    return str(Group((replace(group.members[0], role=role),)))


def regrouped(layout: Layout, counts: Counts) -> str:
    """The layout with so many copies of each group: added at the last one that is there, taken from the end."""
    groups = [replace(group, repeat=1) for group in layout.groups for _ in range(group.repeat)]
    for name, count in counts.items():
        own = [at for at, group in enumerate(groups) if name_of(group) == name]
        last = own[-1] + 1 if own else len(groups)
        groups[last:last] = list(parse(name).groups) * max(0, count - len(own))
        for at in reversed(own[count:]):
            del groups[at]
    return str(Layout.of(groups))


def busiest(need: Needs, counts: Counts, use: float) -> tuple[str, float]:
    """The group that lacks most, and how many times what it may be used it would have to be."""
    over = {name: need.get(name, 0.0) / use / count if count else math.inf for name, count in counts.items()}
    name = max(over, key=lambda name: over[name])
    return name, over[name]


def propose(seen: Observation, need: Needs, coming: Needs, text: Needs, peak: Needs, limits: Limits) -> Iterator[Move]:
    """Moves that help, the cheaper first.

    Args:
        need: now. coming: of that, for what comes, without what waits. text: of that, what requests without media need.
        peak: the most that was needed in the quiet time.
    """
    groups = _Groups(limits, counts_of(seen.layout))
    counts = groups.counts
    wants = {name: groups.bounded(name, math.ceil(need.get(name, 0.0) / limits.use)) for name in counts}
    keeps = {name: groups.bounded(name, math.ceil(peak.get(name, 0.0) / limits.use / ROOM)) for name in counts}
    kept = {name: max(wants[name], min(counts[name], keeps[name])) for name in counts}
    flipped = groups.flipped(wants) if limits.switchable else counts
    for what, to in (("flip", flipped), ("scale", groups.fitted(kept, wants, need, coming, text))):
        if to == counts:
            continue
        relieves, before = busiest(need, counts, limits.use)
        after = busiest(need, to, limits.use)[1]
        why = f"{relieves} would be used {need.get(relieves, 0.0) / counts[relieves]:.0%} of its time"
        if (less := given_up(to, counts)) and not added(to, counts):
            most = (f"{max(peak[name], 0.0):.2f} {name}" for name in less)
            why = f"no more than {', '.join(most)} was needed for a while"
        yield Move(what, regrouped(seen.layout, to), to, relieves, before, after, why)


def given_up(to: Counts, counts: Counts) -> list[str]:
    """Groups that there will be fewer of."""
    return [name for name, count in counts.items() if to.get(name, 0) < count]


def added(to: Counts, counts: Counts) -> list[str]:
    """Groups that there will be more of."""
    return given_up(counts, to)


@dataclass(frozen=True)
class Outlook:
    """How sure it is what is needed.

    Attributes:
        late: groups that are busier than they may be, by what hardly ever fewer requests come than. certain: by what
            fewer never come than.
        rising: of some kind of request more comes than was to be expected.
    """

    late: frozenset[str] = frozenset()
    certain: frozenset[str] = frozenset()
    rising: bool = False


def forbidden(move: Move, seen: Observation, need: Needs, memory: Memory, outlook: Outlook) -> str:
    """Why a move must not be made now; "" where it may."""
    counts = counts_of(seen.layout)
    less, more = given_up(move.counts, counts), added(move.counts, counts)
    until_s, _ = memory.resting.get(move.target, (0.0, 0.0))
    if move.what == "share" and seen.at_s < memory.shared_s + SHARE_S * memory.calm:
        return "core shares were changed a moment ago"
    if seen.changing and not (
        move.what != "share" and seen.own and move.before > 1 and not less
    ):  # more is needed: what drains is taken back
        return "a change is under way"
    if seen.heard < HEARD:
        return f"only {seen.heard:.0%} of the front doors say what comes"
    if less and seen.heard < 1.0:
        return "nothing is given up while some front doors do not say what comes"
    if until_s > seen.at_s:
        return f"it failed, and is not tried again for {until_s - seen.at_s:.0f} s"
    if less and any(in_vain(name, need, memory, seen.at_s - TRADE_S * memory.calm) for name in more):
        return "the other way round it was decided a moment ago, and no more is needed than then"
    sure = outlook.late if move.what == "flip" else outlook.certain  # a start costs more than a flip that was in vain
    if less and more and move.what != "relayout" and not sure.intersection(more):
        return f"more of {', '.join(more)} may be needed, but that is not sure enough to take from others"
    if less and not more and outlook.rising:
        return "nothing is given up while more comes than did"
    if less and more and move.before < GAIN * move.after:
        return f"{move.relieves} would be less busy by less than {GAIN - 1:.0%}, which is not worth taking from others"
    return ""


def in_vain(name: str, need: Needs, memory: Memory, since_s: float) -> bool:
    """Whether a copy of a group was given up after that time when hardly less was needed of it than now: it should not
    have been, or the load goes up and down too fast to be followed."""
    at_s, needed = memory.given_up.get(name, (-math.inf, 0.0))
    return at_s > since_s and need.get(name, 0.0) < GAIN * GAIN * needed


class _Groups:
    """Counts that may be, beside those that are."""

    def __init__(self, limits: Limits, counts: Counts) -> None:
        self._limits, self.counts = limits, counts
        self._of = {name: parse(name).groups[0] for name in counts}

    def bounded(self, name: str, count: int) -> int:
        return max(min(count, self._limits.most.get(name, count)), self._limits.least.get(name, 1))

    def devices(self, counts: Counts) -> int:
        return sum(self._of[name].tp * count for name, count in counts.items())

    def flipped(self, wants: Counts) -> Counts:
        """With as many of P as D is short of, or the reverse; as it is where that is not enough for all."""
        short = [name for name, count in self.counts.items() if wants[name] > count]
        other = other_half(short[0]) if len(short) == 1 else ""
        if other not in self.counts:
            return self.counts
        lacks = wants[short[0]] - self.counts[short[0]]
        left = self.counts[other] - lacks
        return {**self.counts, short[0]: wants[short[0]], other: left} if left >= wants[other] else self.counts

    def fitted(self, kept: Counts, wants: Counts, need: Needs, coming: Needs, text: Needs) -> Counts:
        """`kept` with no more devices than there may be: first what is kept only for later goes, then all is shared
        out."""
        fits = dict(kept)
        for name in sorted(fits, key=lambda name: wants[name] - fits[name]):
            while fits[name] > wants[name] and self.devices(fits) > self._limits.devices:
                fits[name] -= 1
        return fits if self.devices(fits) <= self._limits.devices else self._shared_out(wants, need, coming, text)

    def _shared_out(self, wants: Counts, need: Needs, coming: Needs, text: Needs) -> Counts:
        """What text alone needs, if that is not too much, and then one copy after another to who would be busiest with
        what comes. What waits in front of one group is in front of the next a moment later, and counts where nothing
        comes."""

        def busy(name: str) -> tuple[float, float]:
            copies = max(shares[name], 0.5)
            return coming.get(name, 0.0) / copies, need.get(name, 0.0) / copies

        least = {name: self.bounded(name, 0) for name in wants}
        if self.devices(least) > self._limits.devices:  # they have yet to come
            least = dict(self.counts)
        own = {name: math.ceil(text.get(name, 0.0) / self._limits.use) for name in wants}
        shares = {name: min(wants[name], max(least[name], own[name])) for name in wants}
        if self.devices(shares) > HALF * self._limits.devices:
            shares = least
        while True:
            free = self._limits.devices - self.devices(shares)
            able = [name for name in shares if shares[name] < wants[name] and self._of[name].tp <= free]
            if not able:
                return shares
            shares[max(able, key=busy)] += 1
