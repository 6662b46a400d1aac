"""A simulated deployment that is followed: the same decisions on the simulator's clock, with starts that take time.

Its layout changes as `deploy.change` has it, in short: what may begin does, P and D flip when they are quiet, starts
wait for devices, what is given up finishes what it has. Nothing fails here.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from msgspec.structs import astuple

from deploy.change.limits import kinds
from deploy.follow.follower import moved, step
from deploy.follow.moves import counts_of, name_of, other_half
from deploy.follow.observe import Observer, Seen
from deploy.follow.outcome import Gain, Outcome
from deploy.follow.planning import answer_by_bounds
from deploy.follow.plans import Answer, Plans
from deploy.follow.shares import Held, shares_of
from deploy.follow.types import Counts, Decision, Limits, Memory, Observation, PlanQuestion
from deploy.planner.fleet import Fleet
from deploy.planner.profile import ENCODE, PREFILL, DeviceProfile
from epd_serve.core_shares import parse_core_shares
from epd_serve.layout import Layout
from epd_serve.layout_parser import parse
from epd_serve.placement import InstancePlan
from epd_serve.roles import Role
from proxy.records.counts import KindCounts

TICK_S = 1.0
WINDOW_S = 10.0
SPREAD = 0.2
"""Of start times, to both sides."""


@dataclass(eq=False)
class _Copy:
    """Of a group: its instances, which come and go together. `becomes`: the role that it flips to once it is quiet."""

    group: str
    plans: tuple[InstancePlan, ...]
    up_s: float | None = None
    draining: bool = False
    becomes: Role | None = None

    @property
    def will_be(self) -> str:
        return self.group if self.becomes is None else other_half(self.group)

    @property
    def serves(self) -> bool:
        return self.up_s is not None and not self.draining


@dataclass
class SimulatedFollower:
    """The `tick` of `simulate`, every `TICK_S`.

    Args:
        layout: that it begins with. start_s: from a start until an instance serves, on average.
        tpot_s: of the SLO.
        plans: empty; None where the groups of the layout stay. planner: answers for them (`planning.py`).

    Attributes:
        decisions: all of them. gains: of the moves that could be measured.
    """

    layout: Layout
    profile: DeviceProfile
    limits: Limits
    start_s: float
    tpot_s: float | None = None
    seed: int = 0
    plans: Plans | None = None
    planner: Callable[[PlanQuestion, Plans], Answer] = answer_by_bounds
    decisions: list[Decision] = field(default_factory=list)
    gains: list[Gain] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._observer = Observer(self.profile, self.tpot_s)
        self._memory, self._chance = Memory(), random.Random(self.seed)
        self._copies: list[_Copy] = []
        self._numbers: Counter[Role] = Counter()
        self._past: deque[tuple[float, Mapping[str, KindCounts]]] = deque()
        self._decide_at_s: float | None = None
        self._begun: Decision | None = None
        self._after: Outcome | None = None
        self._shared_s = -math.inf

    def __call__(self, fleet: Fleet) -> None:
        now_s = fleet.clock.now_s
        if self._decide_at_s is None:
            self._take_in(fleet)
            self._decide_at_s = now_s + WINDOW_S  # arrivals of less than a window would look like more and more
        self._remember(fleet)
        self._carry_on(fleet)
        if now_s >= self._decide_at_s:
            self._decide_at_s = now_s + self.limits.every_s
            self._decide(fleet)

    def wants(self, layout: Layout) -> None:
        """From now on."""
        self.layout = layout

    # --- decisions --------------------------------------------------------------------------------------------------

    def _decide(self, fleet: Fleet) -> None:
        now_s = fleet.clock.now_s
        past_s, past = self._past[0]
        came = {kind: _since(past.get(kind), counts) for kind, counts in _counted(fleet).items()}
        seen = self._observer(
            now_s,
            self.layout,
            self._seen(fleet),
            came,
            max(now_s - past_s, TICK_S),
            start_s=self.start_s,
            changing=not self._reached(),
            shares=shares_of(self._held()),
        )
        self._prove(seen)
        self._memory, decision = step(seen, self._memory, self.limits, self.plans)
        self.decisions.append(decision)
        if decision.question is not None and self.plans is not None:
            self.plans = self.plans.with_answer(self.planner(decision.question, self.plans))
        if decision.chosen is not None:
            self._memory = moved(decision, self._memory, self.limits)
            if decision.chosen.core_share:
                self._share(fleet, parse_core_shares(decision.chosen.core_share) or {})
                return
            self._begun, self._after = decision, None
            self.wants(parse(decision.chosen.layout))
            self._carry_on(fleet)

    def _prove(self, seen: Observation) -> None:
        """Measure the move before, from when it is done until the next one."""
        if self._begun is not None and not seen.changing:
            self._after, self._begun = Outcome(self._begun, seen.at_s), None
        if self._after is None or not self._after.look(seen, self.limits.use):
            return
        if (gain := self._after.gain()) is not None:
            self.gains.append(gain)
            self._after = None

    def _seen(self, fleet: Fleet) -> list[Seen]:
        now_s = fleet.clock.now_s
        seen = []
        for copy in self._copies:
            if copy.up_s is None or not copy.serves:
                continue
            for plan in copy.plans:
                stage = fleet.instances[plan.id].stage
                busy_s = stage.busy_s[ENCODE] + stage.busy_s[PREFILL]
                rate = stage.rates.decode_tokens_per_s if stage.running and plan.role.decodes else 0.0
                up_s = now_s - max(copy.up_s, self._shared_s)
                seen.append(
                    Seen(plan.role, copy.group, up_s, stage, 1.0 / rate if rate else 0.0, id=plan.id, busy_s=busy_s)
                )
        return seen

    def _held(self) -> Iterator[Held]:
        for copy in self._copies:
            for plan in copy.plans:
                if plan.core_share is not None:
                    yield Held(copy.group, plan.role, plan.devices, plan.core_share)

    def _remember(self, fleet: Fleet) -> None:
        now_s = fleet.clock.now_s
        self._past.append((now_s, _counted(fleet)))
        while self._past[0][0] < now_s - WINDOW_S:
            self._past.popleft()

    # --- what is done about them ------------------------------------------------------------------------------------

    def _take_in(self, fleet: Fleet) -> None:
        """What is there at the beginning."""
        plans = [fleet.instances[name].plan for name in fleet.instances]
        self._numbers.update(plan.role for plan in plans)
        left = iter(plans)
        for group in self.layout.groups:
            for _ in range(group.repeat):
                own = tuple(next(left) for _ in range(group.instance_count // group.repeat))
                self._copies.append(_Copy(name_of(group), own, up_s=-math.inf))

    def _reached(self) -> bool:
        settled = all(copy.serves for copy in self._copies)
        return settled and Counter(copy.group for copy in self._copies) == counts_of(self.layout)

    def _carry_on(self, fleet: Fleet) -> None:
        self._finish(fleet)
        wanted = counts_of(self.layout)
        there = Counter(copy.will_be for copy in self._copies if copy.becomes or not copy.draining)
        if self.limits.switchable:
            self._flip(fleet, wanted, there)
        for group, count in wanted.items():
            for _ in range(count - there[group]):
                self._start(fleet, group)
        for group, count in wanted.items():
            surplus = [copy for copy in self._copies if copy.group == group and copy.serves]
            for copy in surplus[: max(0, min(there[group] - count, len(surplus) - 1))]:
                self._drain(fleet, copy)
        self._leave(fleet)

    def _leave(self, fleet: Fleet) -> None:
        """Drain what is of groups that are not wanted any more: all of it once what is wanted serves, and before that
        one after another, to make room."""
        going = [copy for copy in self._copies if self._goes(copy) and self._spared(copy)]
        stays = Counter(copy.group for copy in self._copies if copy.serves and not self._goes(copy))
        if stays != counts_of(self.layout):
            going = going[:1] if all(copy.serves for copy in self._copies) else []
        for copy in going:
            if self._spared(copy):
                self._drain(fleet, copy)

    def _goes(self, copy: _Copy) -> bool:
        return copy.serves and copy.group not in counts_of(self.layout)

    def _spared(self, copy: _Copy) -> bool:
        """No kind of request that is served and will be loses its last path."""
        serving = [one for one in self._copies if one.serves]
        now, left = (
            kinds(plan.role for one in some for plan in one.plans)
            for some in (serving, [one for one in serving if one is not copy])
        )
        return left >= now & kinds(self.layout.roles)

    def _finish(self, fleet: Fleet) -> None:
        for copy in [copy for copy in self._copies if copy.draining]:
            names = [plan.id for plan in copy.plans]
            if copy.becomes is not None and fleet.quiet(names[0]):
                fleet.take(names[0], copy.becomes)
                copy.plans = (fleet.instances[names[0]].plan,)
                copy.group, copy.draining, copy.becomes = other_half(copy.group), False, None
                copy.up_s = fleet.clock.now_s  # while it decodes what it had, its prompts are slow
            elif copy.becomes is None and all(map(fleet.empty, names)):
                for name in names:
                    fleet.remove(name)
                self._copies.remove(copy)

    def _flip(self, fleet: Fleet, wanted: Counts, there: Counter[str]) -> None:
        for group in [group for group in wanted if there[group] > wanted[group]]:
            other = other_half(group)
            while other in wanted and there[group] > wanted[group] and there[other] < wanted[other]:
                copy = next(
                    (copy for copy in self._copies if copy.group == group and copy.serves),
                    None,
                )
                if copy is None:
                    break
                role = parse(other).groups[0].members[0].role
                there[group] -= 1
                there[other] += 1
                copy.draining, copy.becomes = True, role
                fleet.drain(copy.plans[0].id)
        self._finish(fleet)

    def _share(self, fleet: Fleet, shares: Mapping[str, float]) -> None:
        """By role, from now on."""
        self._shared_s = fleet.clock.now_s
        for copy in self._copies:
            if any(plan.core_share is not None for plan in copy.plans):
                copy.plans = tuple(replace(plan, core_share=shares[plan.role.value]) for plan in copy.plans)
                for plan in copy.plans:
                    if plan.id in fleet.instances:
                        fleet.share(plan.id, shares[plan.role.value])

    def _start(self, fleet: Fleet, group: str) -> None:
        """Where devices are free; else at a later tick."""
        copy_of = parse(group).groups[0]
        free = self._free(copy_of.tp)
        if not free:
            return
        plans = []
        shares = shares_of(self._held()).get(group)
        for member in copy_of.members:
            share = shares.of[member.role] if shares is not None else None
            for _ in range(member.count):
                name = f"{member.role.value}{self._numbers[member.role]}"
                plans.append(InstancePlan(name, member.role, member.tp, tuple(free), core_share=share))
                self._numbers[member.role] += 1
        names = [plan.id for plan in plans]
        copy = _Copy(group, tuple(_beside(plan, names) for plan in plans))
        self._copies.append(copy)
        for plan in copy.plans:
            fleet.hold(plan)
        fleet.clock.after(self.start_s * self._chance.uniform(1 - SPREAD, 1 + SPREAD), lambda: self._up(fleet, copy))

    def _free(self, count: int) -> Sequence[int]:
        """So many devices, or none. Beside what goes, but has the last path until its successor serves, there is room:
        memory for both is taken to be there."""
        for beside in (False, True):
            staying = (copy for copy in self._copies if not (beside and self._goes(copy) and not self._spared(copy)))
            used = {device for copy in staying for plan in copy.plans for device in plan.devices}
            free = [device for device in range(self.limits.devices) if device not in used]
            if len(free) >= count:
                return free[:count]
        return ()

    def _up(self, fleet: Fleet, copy: _Copy) -> None:
        copy.up_s = fleet.clock.now_s
        for plan in copy.plans:
            fleet.add(plan)

    def _drain(self, fleet: Fleet, copy: _Copy) -> None:
        copy.draining = True
        for plan in copy.plans:
            fleet.drain(plan.id)


def _beside(plan: InstancePlan, names: Sequence[str]) -> InstancePlan:
    return replace(plan, colocated_with=tuple(name for name in names if name != plan.id))


def _counted(fleet: Fleet) -> Mapping[str, KindCounts]:
    """Since the beginning, by kind."""
    return {
        kind: KindCounts(
            one.came, one.came, one.items, one.item_tokens, one.prompt_tokens, one.ended, one.ended, one.output_tokens
        )
        for kind, one in fleet.counts.items()
    }


def _since(before: KindCounts | None, now: KindCounts) -> KindCounts:
    return KindCounts(*(new - old for new, old in zip(astuple(now), astuple(before or KindCounts()), strict=True)))
