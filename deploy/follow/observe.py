"""What is seen, in the terms of a decision: what came, and how much of each group's time it takes.

How fast a group works its stages say themselves, by what they got done per second of busy time; where they have not
worked yet, or decode, the profile says it (ModServe §4.2: N = ⌈L / C⌉, with C from offline profiles).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType

from deploy.change.types import Kind
from deploy.follow.moves import counts_of
from deploy.follow.types import Needs, Observation, Shares, part_of, parts_of
from deploy.planner.candidates import kinds_of, seconds_of
from deploy.planner.profile import DECODE, ENCODE, PREFILL, DeviceProfile
from deploy.planner.workload import Work
from epd_serve.layout import Layout
from epd_serve.layout_parser import parse
from epd_serve.roles import Role
from proxy.records.counts import KindCounts
from proxy.registry.instance_state import Reported

WARM_S = 10.0
"""A stage that has been up for less is not as fast as it will be."""
FILL = 0.02
"""Of a stage's batch; from fewer requests nobody can tell how many it would hold."""
KEPT, ENOUGH = 0.9, 50.0
"""Of the sums that usual sizes are made of, from one window to the next; less, where they are of more requests than are
enough: sizes may change at once (ModServe §3.2: bursts of images are requests with more of them)."""
TINY = 1e-9
NO_SHARES: Mapping[str, Shares] = MappingProxyType({})


@dataclass(frozen=True)
class Seen:
    """One instance that serves.

    Attributes:
        group: that it is part of, as `moves.name_of` has it. up_s: for how long it has been, on the cores that it has.
        report: its word on itself; None where it has not said anything yet.
        token_s: between two tokens of a request that decodes; 0 where none does.
        full: share of its batch and of its KV, the larger one, that is used.
        id: of the instance. busy_s: for how long it has encoded and prefilled, since any time.
    """

    role: Role
    group: str
    up_s: float
    report: Reported | None
    token_s: float = 0.0
    full: float = 0.0
    id: str = ""
    busy_s: float = 0.0

    def part(self, shares: Mapping[str, Shares]) -> str:
        return part_of(self.group, self.role) if self.group in shares else self.group

    def share(self, shares: Mapping[str, Shares]) -> float:
        """Of its device's cores."""
        return shares[self.group].of[self.role] if self.group in shares else 1.0


class Observer:
    """Makes observations, and remembers what requests and stages are usually like.

    Args:
        profile: of the devices; without one, what has never been measured costs nothing yet, and is started for only
            once it waits.
        tpot_s: of the SLO; None where there is none.
    """

    def __init__(self, profile: DeviceProfile | None, tpot_s: float | None) -> None:
        self._profile, self._tpot_s = profile, tpot_s
        self._sums: dict[Kind, tuple[float, ...]] = {}
        self._token_s: dict[tuple[str, str], float] = {}
        self._slower: dict[tuple[str, str], float] = {}
        self._busy_s: dict[str, tuple[float, float]] = {}  # by instance, and when it was so

    def __call__(
        self,
        at_s: float,
        layout: Layout,
        seen: Sequence[Seen],
        came: Mapping[Kind, KindCounts],
        window_s: float,
        *,
        start_s: float,
        heard: float = 1.0,
        changing: bool = False,
        devices: int | None = None,
        shares: Mapping[str, Shares] = NO_SHARES,
    ) -> Observation:
        for kind, one in came.items():
            new = (
                one.known_prompts,
                one.items,
                one.item_tokens,
                one.prompt_tokens,
                one.known_outputs,
                one.output_tokens,
            )
            before = self._sums.get(kind, (0.0,) * len(new))
            kept = min(KEPT, max(0.0, ENOUGH - one.known_prompts) / max(before[0], TINY))
            self._sums[kind] = tuple(kept * old + more for old, more in zip(before, new, strict=True))
        self._measure(seen, shares)
        return Observation(
            at_s,
            layout,
            window_s,
            {kind: one.requests for kind, one in came.items()},
            {kind: self._costs(layout, self._usual([kind]), shares) for kind in came},
            self._backlog(layout, seen, shares),
            start_s,
            heard,
            changing,
            {kind: self._usual([kind]) for kind in came},
            devices,
            self._busy(seen, at_s, shares),
            shares=shares,
        )

    def _usual(self, kinds: Iterable[Kind]) -> Work:
        """A request of these kinds on average; the last windows count for most."""
        sums = [sum(values) for values in zip(*(self._sums[kind] for kind in kinds), strict=True)] or [0.0] * 6
        sized, items, item_tokens, prompt_tokens, ended, output_tokens = sums
        sized, ended = max(sized, TINY), max(ended, TINY)
        return Work(items / sized, item_tokens / sized, prompt_tokens / sized, output_tokens / ended)

    def _measure(self, seen: Iterable[Seen], shares: Mapping[str, Shares]) -> None:
        """Seconds of an instance for a token, by group and kind of work, as those that are warm say it. Of one with
        a share of a device, seconds of the whole device."""
        found: dict[tuple[str, str], list[float]] = {}
        for one in seen:
            if one.report is None or one.up_s < WARM_S:
                continue
            share = one.share(shares)
            if one.report.item_tokens_per_s:
                found.setdefault((one.group, ENCODE), []).append(share / one.report.item_tokens_per_s)
            if one.report.prompt_tokens_per_s and one.role.prefills:
                found.setdefault((one.group, PREFILL), []).append(share / one.report.prompt_tokens_per_s)
            if one.token_s and one.full > FILL and one.role.decodes and one.report.running:
                # As many as run now take as much of it as they fill, or as their steps take of the SLO's. It may be
                # full of reserved KV while nobody runs.
                used = max(one.full, one.token_s / self._tpot_s if self._tpot_s else 0.0)
                found.setdefault((one.group, DECODE), []).append(share * one.token_s * used / one.report.running)
        self._token_s |= {key: median(values) for key, values in found.items()}
        if self._profile is not None:
            usual = self._usual(self._sums)
            tokens = _tokens(usual)
            for (group, kind), token_s in self._token_s.items():
                expected_s = self._known(group, usual)[kind]
                if (group, kind) in found and kind != DECODE and expected_s:
                    self._slower[group, kind] = token_s * tokens[kind] / expected_s

    def _seconds(self, group: str, work: Work) -> Mapping[str, float]:
        """Of one instance with its whole device, that a request takes, by kind of work: as the profile says it of its
        size, and as many times that as what came lately took."""
        if self._profile is None:
            return {kind: self._token_s.get((group, kind), 0.0) * count for kind, count in _tokens(work).items()}
        known = self._known(group, work)
        return {kind: seconds * self._slower.get((group, kind), 1.0) for kind, seconds in known.items()}

    def _known(self, group: str, work: Work) -> Mapping[str, float]:
        assert self._profile is not None
        return seconds_of(self._profile, parse(group).groups[0].tp, work, tpot_s=self._tpot_s)

    def _costs(self, layout: Layout, work: Work, shares: Mapping[str, Shares]) -> Needs:
        """Group-seconds of a request, by part: each takes the share of a kind of work that its copies are of all that
        do such."""
        counts = counts_of(layout)
        does = _does(layout)
        costs = dict.fromkeys(parts_of(counts, shares), 0.0)
        for name, count in counts.items():
            seconds = self._seconds(name, work)
            for role, kind in does[name]:
                copies = sum(counts[other] for other in counts if kind in (each for _, each in does[other]))
                same = sum(each == kind for _, each in does[name])  # roles of the group that do it
                part, whole = (part_of(name, role), shares[name].part(role)) if name in shares else (name, 1.0)
                costs[part] += seconds[kind] * count / copies / same / whole
        return costs

    def _backlog(self, layout: Layout, seen: Iterable[Seen], shares: Mapping[str, Shares]) -> Needs:
        work = self._usual(self._sums)
        backlog = dict.fromkeys(parts_of(counts_of(layout), shares), 0.0)
        for one in seen:
            part = one.part(shares)
            if one.report is None or part not in backlog:
                continue
            seconds = {kind: s / one.share(shares) for kind, s in self._seconds(one.group, work).items()}
            if work.item_tokens:
                backlog[part] += one.report.pending_item_tokens * seconds[ENCODE] / work.item_tokens
            if one.role.prefills and work.prompt_tokens:
                backlog[part] += one.report.pending_prompt_tokens * seconds[PREFILL] / work.prompt_tokens
            elif one.role.decodes:
                backlog[part] += one.report.waiting * seconds[DECODE]
        return backlog

    def _busy(self, seen: Iterable[Seen], at_s: float, shares: Mapping[str, Shares]) -> Needs:
        """Group-seconds a second since the look before. Who decodes is as busy as its tokens take of the most that it
        could make within the objective."""
        work = self._usual(self._sums)
        busy, now = dict[str, float](), dict[str, tuple[float, float]]()
        for one in seen:
            part = one.part(shares)
            before_s, looked_s = self._busy_s.get(one.id, (one.busy_s, at_s))
            share = (one.busy_s - before_s) / (at_s - looked_s) if at_s > looked_s else 0.0
            if one.report is not None and one.token_s and work.output_tokens > 1:
                most_s = self._seconds(one.group, work)[DECODE] / one.share(shares) / (work.output_tokens - 1)
                share += one.report.running / one.token_s * most_s
            busy[part] = busy.get(part, 0.0) + min(1.0, share)
            now[one.id] = one.busy_s, at_s
        self._busy_s = now
        return busy


def _tokens(work: Work) -> Mapping[str, float]:
    return {ENCODE: work.item_tokens, PREFILL: work.prompt_tokens, DECODE: max(0.0, work.output_tokens - 1)}


def _does(layout: Layout) -> Mapping[str, frozenset[tuple[Role, str]]]:
    """Kinds of work with who does them, by group."""
    apart = Role.E in layout.roles
    return {
        name: frozenset(
            (one.role, kind) for one in parse(name).groups[0].members for kind in kinds_of(one.role, apart=apart)
        )
        for name in counts_of(layout)
    }
