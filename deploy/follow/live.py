"""The follower of a deployment that runs: it looks, decides, and has the layout changed to what was decided.

In the event loop of control, beside the reconciler. A layout is changed as an operator changes it, by the same command,
so what an operator is promised holds here, too: no last path goes, streams go on, a failed change goes back. It has no
state of its own to keep: after control has died it watches for a quiet time again before it gives anything up.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from deploy.control.changes import Change, State
from deploy.control.controller import FOLLOW, Controller
from deploy.control.reconciler import Reconciler
from deploy.follow.follower import failed, lacking, moved, step
from deploy.follow.moves import name_of
from deploy.follow.observe import Observer, Seen
from deploy.follow.outcome import Gain, Outcome, Working
from deploy.follow.planning import answer
from deploy.follow.plans import Answer, Plans
from deploy.follow.shares import Held, shares_of
from deploy.follow.types import Decision, Limits, Memory, Observation, PlanQuestion
from deploy.runtime.protocol import Phase, Spec
from epd_serve.errors import EpdError
from epd_serve.layout import Layout
from epd_serve.layout_parser import parse
from epd_serve.wire import StageReport
from proxy.records.counts import Counts, KindCounts
from proxy.records.records import Question, RecordsAnswer
from proxy.registry.instance_state import InstanceView, reported_rate
from proxy.registry.table import InstanceTable

logger = logging.getLogger(__name__)
Look = Callable[[Question], Awaitable[RecordsAnswer]]
WINDOW_S = 10.0
KINDS = ("text", "media")
HELD_S = 600.0
"""For so long after an operator has changed the layout it stays as it was asked for."""
REMEMBERED = 256
LOOK_S = 5.0
"""What front doors may take to say what came."""


@dataclass
class Entry:
    """Decisions of one outcome, one after another.

    Attributes:
        decision: the last of them. times: how many.
        outcome: what became of the move: `stays`, `advised`, `begun`, `done`, `held: …`, `refused: …`, `failed: …` or
            `undone: …`.
        gain: of a move that is done, once it is measured.
    """

    decision: Decision
    outcome: str
    times: int = 1
    gain: Gain | None = None


class Follower:
    """Args:
        mode: `act`, `advise`, which decides and changes nothing, or `off`, which does not look.
        table: of the front doors, with what stages report. look: asks all front doors what came.
        plans: None where the groups of the layout stay.

    Attributes:
        entries: of the last decisions, the newest last; one stands for several that are alike.
        lacking: how many devices each copy has that is wanted, too, and for which there are none.
        moves: that have ended, by what they were and how they ended: `done`, `failed`, `undone` or `refused`.
        gains: of those that were measured, the newest last.
    """

    def __init__(
        self,
        mode: str,
        limits: Limits,
        observer: Observer,
        controller: Controller,
        reconciler: Reconciler,
        table: InstanceTable,
        look: Look,
        plans: Plans | None = None,
    ) -> None:
        self.mode, self.limits = mode, limits
        self.entries: deque[Entry] = deque(maxlen=REMEMBERED)
        self._observer, self._controller = observer, controller
        self._reconciler, self._table, self._ask = reconciler, table, look
        self._plans = plans
        self._planning: asyncio.Task[None] | None = None
        self._memory = Memory()
        self._began: tuple[Change, Entry] | None = None
        self._after: tuple[Change, Entry, Outcome] | None = None
        self._shared_s = -math.inf
        self._given: dict[str, float] = {}
        self._busy_s: dict[str, float] = {}
        self._deciding = asyncio.Lock()
        self.lacking: tuple[int, ...] = ()
        self.moves = Counter[tuple[str, str]]()
        self.gains: deque[Gain] = deque(maxlen=REMEMBERED)

    @property
    def views(self) -> tuple[InstanceView, ...]:
        """Of the instances, with their last reports."""
        return self._table.snapshot()

    async def run(self) -> None:
        """For ever."""
        try:
            while True:
                await asyncio.sleep(self.limits.every_s)
                if self.mode != "off":
                    try:
                        await self._turn()
                    except Exception:  # a defect of ours changes nothing, and the next look may do better
                        logger.exception("nothing is decided")
        finally:
            if self._planning is not None:
                self._planning.cancel()

    async def _turn(self) -> None:
        try:
            async with asyncio.timeout(LOOK_S):
                seen = await self._look()
        except TimeoutError:
            logger.warning("nothing is decided: the front doors do not say what comes within %g s", LOOK_S)
            return
        except EpdError as error:
            logger.warning("nothing is decided: %s", error)
            return
        async with self._deciding:
            await self.decide(seen)

    async def switch(self, mode: str) -> None:
        """Returns once what is being decided by the mode before has begun, or come to nothing. Who was `off` has
        nothing to remember."""
        async with self._deciding:
            self.mode = mode
            if mode != "act":
                self._controller.want(())
            if mode == "off":
                self._memory, self.lacking = Memory(), ()

    async def decide(self, seen: Observation) -> None:
        """Once, by what is seen now."""
        if self.mode == "off":  # since it was looked
            return
        self._settle()
        await self._prove(seen)
        before = self._memory
        self._memory, decision = step(seen, before, self.limits, self._plans)
        if not seen.changing:
            self.lacking = lacking(seen, before, self.limits, decision)
        if decision.question is not None and not self._held():
            self._plan(decision.question)
        if decision.chosen is None:
            self._note(Entry(decision, "stays"))
        elif self.mode != "act":
            self._note(Entry(decision, "advised"))
        elif held := self._held():
            self._note(Entry(decision, f"held: {held}"))
        else:
            await self._move(decision)
        if self.mode == "act":
            self._controller.want(() if self._held() else self.lacking)

    def _plan(self, question: PlanQuestion) -> None:
        """Ask the planner, unless it is at work."""
        if self._planning is None or self._planning.done():
            self._planning = asyncio.create_task(self._ask_planner(question), name="plan a layout")

    async def _ask_planner(self, question: PlanQuestion) -> None:
        assert self._plans is not None
        try:
            found = await answer(question, self._plans)
        except OSError as error:
            found = Answer(question, trouble=f"it could not be started: {error}")
        self._plans = self._plans.with_answer(found)

    async def _move(self, decision: Decision) -> None:
        assert decision.chosen is not None
        move, entry = decision.chosen, Entry(decision, "begun")
        self._note(entry)
        try:
            await self._controller.follow(move.layout, move.core_share)
        except EpdError as error:
            entry.outcome = f"refused: {error}"
            self.moves[move.what, "refused"] += 1
            self._memory = failed(move.target, decision.at_s, self._memory)
            return
        self._settle()  # of what this one supersedes
        self._memory = moved(decision, self._memory, self.limits)
        self._began = (self._reconciler.changes.latest, entry)

    def _settle(self) -> None:
        """What has become of the change that was begun last."""
        if self._began is None or not self._began[0].state.over:
            return
        change, entry = self._began
        self._began = None
        move = entry.decision.chosen
        assert move is not None
        self.moves[move.what, change.state.value] += 1
        reason = change.reason or "another change was begun"
        entry.outcome = "done" if change.state is State.DONE else f"{change.state.value}: {reason}"
        if change.state is State.FAILED:
            self._memory = failed(move.target, time.monotonic(), self._memory)
        if move.core_share:
            self._shared_s = time.monotonic()  # that the workers have read back what was asked for, the change says
        elif change.state is State.DONE:
            ids = {step.action["instance"] for step in change.steps if step.word in ("start", "flip")}
            new = {one.order.id: one.order.spec.role for one in self._reconciler.instances if one.order.id in ids}
            self._after = change, entry, Outcome(entry.decision, time.monotonic(), new, self._working())

    async def _prove(self, seen: Observation) -> None:
        """Whether the move that is done does what it is for; it is undone where it did nothing."""
        if self._after is None:
            return
        change, entry, outcome = self._after
        if seen.changing or not outcome.look(seen, self.limits.use):
            self._after = None
            return
        if entry.gain is None and (gain := outcome.gain()) is not None:
            entry.gain = gain
            self.gains.append(gain)
        trouble = outcome.trouble(self._working())
        if trouble:
            self._after = None
            assert entry.decision.chosen is not None
            self.moves[entry.decision.chosen.what, "undone"] += 1
            entry.outcome = f"undone: {trouble}"
            self._memory = failed(change.layout, seen.at_s, self._memory)
            try:
                await self._controller.follow(change.before)
            except EpdError as error:
                entry.outcome += f"; and it stays, since the way back is refused: {error}"
        elif trouble == "" and entry.gain is not None:
            self._after = None

    def _working(self) -> dict[str, Working]:
        """Instances that run, as front doors see them."""
        views = {view.instance.id: view for view in self.views}
        up = (one.order.id for one in self._reconciler.instances if one.phase is Phase.UP)
        return {
            name: Working(view.instance.role, view.given, view.up)
            for name in up
            if (view := views.get(name)) is not None
        }

    def _held(self) -> str:
        """Why an operator's layout stays; "" where it is the follower's own, or has been there long enough."""
        latest = self._reconciler.changes.latest
        if latest.what in (FOLLOW, "start", "replace"):
            return ""
        ended_s = latest.began + (latest.seconds or 0.0)
        left_s = HELD_S - (time.monotonic() - ended_s)
        return f"`{latest.what}` was asked for, and holds for {left_s:.0f} s more" if left_s > 0 else ""

    async def _look(self) -> Observation:
        counts = (await self._ask(Question(window_s=WINDOW_S))).counts or Counts()
        layout, devices = parse(self._reconciler.wanted.layout), self._controller.devices
        starts = [s for node in self._reconciler.nodes for s in node.start_s.values()]
        change = self._reconciler.changes.present
        own = change is not None and change.what == FOLLOW and change.state is State.UNDER_WAY
        seen = self._observer(
            time.monotonic(),
            layout,
            self._seen(layout),
            {kind: counts.kinds.get(kind, KindCounts()) for kind in KINDS},
            max(counts.seconds, 1.0),
            start_s=max(starts, default=0.0),
            heard=counts.answered / counts.serving if counts.serving else 0.0,
            changing=change is not None,
            devices=None if devices is None else max(devices, layout.device_count),
            shares=shares_of(self._having_shares(layout)),
        )
        return replace(seen, own=own)

    def _seen(self, layout: Layout) -> list[Seen]:
        views = {view.instance.id: view for view in self.views if view.up}
        there = [one.order.spec for one in self._reconciler.instances]
        seen = []
        for one in self._reconciler.instances:
            if one.phase is not Phase.UP or not (group := _group_of(one.order.spec, there, layout)):
                continue
            token_s = full = busy_s = 0.0
            view = views.get(one.order.id)
            report = view.stage if view is not None else None
            if view is not None and report is not None:
                busy_s = self._worked_s(view, report)
                full = max(report.running / report.max_running if report.max_running else 0.0, report.kv_used)
                token_s = 1.0 / report.decode_tokens_per_s if report.decode_tokens_per_s else 0.0
            up_s = min(one.up_s, time.monotonic() - self._shared_s)
            seen.append(Seen(one.order.spec.role, group, up_s, report, token_s, full, one.order.id, busy_s))
        return seen

    def _having_shares(self, layout: Layout) -> Iterator[Held]:
        """Stages that have a share, as is wanted."""
        there = self._reconciler.wanted.specs
        for spec in there:
            if spec.plan is not None and spec.plan.core_share is not None and (group := _group_of(spec, there, layout)):
                yield Held(group, spec.role, (spec.node, spec.devices), spec.plan.core_share, len(spec.cores))

    def _worked_s(self, view: InstanceView, report: StageReport) -> float:
        """For how long an instance that encodes or prefills is busy with all that it was given, by its own rate."""
        name = view.instance.id
        more = max(0.0, view.given - self._given.get(name, view.given))
        self._given[name] = view.given
        rate = reported_rate(view.instance.role, report)
        self._busy_s[name] = self._busy_s.get(name, 0.0) + (more / rate if rate else 0.0)
        return self._busy_s[name]

    def _note(self, entry: Entry) -> None:
        last = self.entries[-1] if self.entries else None
        if last is not None and last.outcome == entry.outcome and _alike(last.decision, entry.decision):
            last.decision, last.times = entry.decision, last.times + 1
        else:
            self.entries.append(entry)


def _alike(one: Decision, other: Decision) -> bool:
    moves = [
        (each.chosen and each.chosen.target, [move.target for move, _ in each.refused], each.plan.split(":")[0])
        for each in (one, other)
    ]
    return one.layout == other.layout and moves[0] == moves[1]


def _group_of(spec: Spec, there: Iterable[Spec], layout: Layout) -> str:
    """The group that it is a part of; where its role is in several, that which shares its devices as it does."""
    having = [
        group
        for group in layout.groups
        if group.tp == len(spec.devices) and any(member.role is spec.role for member in group.members)
    ]
    if len(having) > 1:
        others = (other for other in there if other is not spec)
        shares = any((other.node, other.devices) == (spec.node, spec.devices) for other in others)
        having = [group for group in having if group.colocates is shares] or having
    return name_of(having[0]) if having else ""
