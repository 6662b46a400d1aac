"""The commands on a running deployment. Each is checked to its end before anything is touched, and then begun.

What is begun goes on without whoever asked (`reconciler.py`); how far it is, `status` and `change_json` tell.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from deploy.change.plan import diff
from deploy.change.scaling import scaled
from deploy.change.serving import kinds, required
from deploy.change.types import Plan, Shortage, Wanted
from deploy.control.doors import Doors
from deploy.control.progress import Answer, Change, change_json
from deploy.control.reconciler import Reconciler
from deploy.control.refusals import RefusedError, change_under_way, pause_too_long, pause_too_short, short
from deploy.front.occupancy import under_way
from deploy.runtime.protocol import Observed, Phase, Spec
from epd_serve.errors import EpdError, NotFoundError
from epd_serve.roles import Role

PartJson = dict[str, int | None]
"""A process that is no stage: its `pid`, and `restarts` where they are counted."""


class Controller:
    """In the reconciler's event loop.

    Args:
        launch: the deployment's id.
        aim: makes what is wanted of a layout's text and the specs of those that may stay; raises ConfigError. Called
            in a thread.
        parts: the processes that are no stages, by name.
        configure: has front doors that start from now on go by these `--proxy` options, too; raises ConfigError.
    """

    def __init__(
        self,
        launch: str,
        reconciler: Reconciler,
        doors: Doors,
        aim: Callable[[str, Sequence[Spec]], Wanted],
        parts: Callable[[], Awaitable[Mapping[str, PartJson]]],
        configure: Callable[[Sequence[str]], Awaitable[None]],
    ) -> None:
        self._launch = launch
        self._reconciler = reconciler
        self._doors = doors
        self._aim = aim
        self._parts = parts
        self._configure = configure
        self._restarting: asyncio.Task[None] | None = None
        self._front_trouble = ""

    async def relayout(self, layout: str, *, dry_run: bool = False, pause_s: float = 0.0) -> Answer:
        """Raises RefusedError, ConfigError, LayoutError."""
        return await self._relayout("relayout", layout, dry_run=dry_run, pause_s=pause_s)

    async def scale(self, counts: Mapping[Role, int], *, dry_run: bool = False, pause_s: float = 0.0) -> Answer:
        """Raises as `relayout`."""
        switchable = any(spec.both for spec in self._reconciler.wanted.specs)
        layout = scaled(self._reconciler.wanted.layout, counts, switchable=switchable)
        return await self._relayout("scale", layout, dry_run=dry_run, pause_s=pause_s)

    async def drain(self, name: str, *, dry_run: bool = False) -> Answer:
        """The layout without this instance. Raises as `relayout`, and NotFoundError."""
        role = self._instance(name).order.spec.role
        count = sum(spec.role is role for spec in self._reconciler.wanted.specs)
        layout = scaled(self._reconciler.wanted.layout, {role: count - 1})
        return await self._relayout("drain", layout, dry_run=dry_run, unwanted=(name,))

    async def restart(self, name: str = "", *, pause_s: float = 0.0) -> Answer:
        """Another one in its place; without a name in the place of each, one after another. Raises as `drain`."""
        every = tuple(one.order.id for one in self._reconciler.instances)
        names = (self._instance(name).order.id,) if name else every
        self._check_idle()
        await self._reconciler.look()
        wanted = self._reconciler.wanted
        plans = [self._plan(wanted, (one,), pause_s) for one in names]
        plan = Plan(tuple(wave for one in plans for wave in one.waves))
        await self._check_room(plan, pause_s)
        self._check_idle()
        change = self._reconciler.begin("restart", wanted, pause_s=pause_s, unwanted=names)
        return self._answer(plan, wanted, change)

    async def restart_front(self, options: Sequence[str] = ()) -> None:
        """Have every front door followed by another; returns when that has begun.

        Args:
            options: `KEY=VALUE` of `--proxy`, beside those that they go by now.

        Raises:
            RefusedError: it is being done. ConfigError: no such option, or not such a value.
        """
        if self._front_restarts:
            raise RefusedError("the front doors are being restarted", "change_under_way")
        if options:
            await self._configure(options)
        self._restarting = asyncio.create_task(self._restart_front(), name="restart front doors")

    @property
    def _front_restarts(self) -> bool:
        """Also where a controller before this one has begun it."""
        return self._doors.replacing or (self._restarting is not None and not self._restarting.done())

    async def _restart_front(self) -> None:
        self._front_trouble = ""
        try:
            await self._doors.restart()
        except EpdError as error:
            self._front_trouble = error.message

    async def undo(self, *, pause_s: float = 0.0) -> Answer:
        """Back to the layout that was wanted before, also from the middle of a change. Raises as `relayout`."""
        reconciler = self._reconciler
        if reconciler.changes.present is not None and reconciler.changes.present.before == reconciler.wanted.layout:
            wanted = reconciler.wanted  # instances are being replaced: those that are left stay
            return self._answer(Plan(()), wanted, reconciler.begin("undo", wanted))
        if len(reconciler.layouts) < 2:
            raise RefusedError("there was no other layout before this one", "nothing_to_undo")
        return await self._relayout("undo", reconciler.layouts[-2], pause_s=pause_s, anyway=True)

    def change(self, number: int) -> Change:
        """Raises NotFoundError."""
        changes = self._reconciler.changes
        for one in (*changes.past, changes.present):
            if one is not None and one.number == number:
                return one
        raise NotFoundError(f"there is no change {number}", code="unknown_change")

    async def status(self) -> dict[str, Any]:
        """What is wanted, what there is, and what is being done about it."""
        reconciler = self._reconciler
        changes = reconciler.changes
        return {
            "launch": self._launch,
            "layout": reconciler.wanted.layout,
            "state": self._state(),
            "trouble": reconciler.trouble.reason,
            "paused_s": round(reconciler.paused_s, 3),
            "change": change_json(changes.present) if changes.present is not None else None,
            "instances": [self._instance_json(one) for one in reconciler.instances],
            "parts": dict(await self._parts()),
            "front": {
                "restarting": self._front_restarts,
                "trouble": self._front_trouble,
            },
            "layouts": list(reconciler.layouts),
            "past": [change_json(one) for one in changes.past],
        }

    def _state(self) -> str:
        reconciler = self._reconciler
        if reconciler.trouble.reason or any(one.phase is Phase.DOWN for one in reconciler.instances):
            return "degraded"
        if reconciler.paused_s:
            return "paused"
        return "changing" if reconciler.changes.present is not None else "steady"

    async def _relayout(
        self,
        what: str,
        layout: str,
        *,
        dry_run: bool = False,
        pause_s: float = 0.0,
        unwanted: tuple[str, ...] = (),
        anyway: bool = False,
    ) -> Answer:
        if not (dry_run or anyway):
            self._check_idle()
        await self._reconciler.look()
        stay = [one.order.spec for one in self._reconciler.instances if one.order.id not in unwanted]
        wanted = await asyncio.to_thread(self._aim, layout, stay)
        plan = self._plan(wanted, unwanted, pause_s)
        await self._check_room(plan, pause_s)
        notes = self._notes(wanted)
        if dry_run:
            return self._answer(plan, wanted, None, notes)
        if not anyway:
            self._check_idle()
        change = self._reconciler.begin(what, wanted, pause_s=pause_s, unwanted=unwanted)
        return self._answer(plan, wanted, change, notes)

    def _plan(self, wanted: Wanted, unwanted: Sequence[str], pause_s: float) -> Plan:
        """All of the change in advance. Raises RefusedError where it would get stuck."""
        actual = self._reconciler.actual(unwanted)
        actual = replace(actual, required=required(wanted, actual), leaving=frozenset(), quiet=frozenset())
        plan = diff(wanted, actual, may_pause=pause_s > 0)
        if isinstance(plan, Shortage):
            raise short(plan, wanted.layout)
        needed_s = plan.seconds(self._start_s(), paused=True) if plan.pauses else None
        if needed_s is not None and needed_s > pause_s:
            raise pause_too_short(needed_s, pause_s)
        return plan

    async def _check_room(self, plan: Plan, pause_s: float) -> None:
        """Raises RefusedError where requests that wait in the pause would be too many."""
        if plan.pauses and (most_s := await self._doors.pausable_s()) < pause_s:
            raise pause_too_long(pause_s, most_s)

    def _answer(self, plan: Plan, wanted: Wanted, change: Change | None, notes: tuple[str, ...] = ()) -> Answer:
        start_s = self._start_s()
        pause_s = plan.seconds(start_s, paused=True) if plan.pauses else 0.0
        return Answer(plan, wanted.layout, change, notes, plan.seconds(start_s), pause_s)

    def _start_s(self) -> Mapping[Role, float]:
        return {role: seconds for node in self._reconciler.overlay.nodes for role, seconds in node.start_s.items()}

    def _notes(self, wanted: Wanted) -> tuple[str, ...]:
        """What is served now and will not be."""
        now = kinds(spec.role for spec in self._reconciler.wanted.specs)
        lost = now - kinds(spec.role for spec in wanted.specs)
        return tuple(f"{wanted.layout} does not serve requests of kind {kind}" for kind in sorted(lost))

    def _check_idle(self) -> None:
        change = self._reconciler.changes.present
        if change is not None:
            raise change_under_way(change.what, change.layout)

    def _instance(self, name: str) -> Observed:
        for one in self._reconciler.instances:
            if one.order.id == name:
                return one
        there = ", ".join(one.order.id for one in self._reconciler.instances)
        raise NotFoundError(f"there is no instance {name!r}; there are {there}", code="unknown_instance")

    def _instance_json(self, one: Observed) -> dict[str, Any]:
        spec = one.order.spec
        return {
            "id": one.order.id,
            "role": spec.role.value,
            "both": spec.both,
            "node": spec.node,
            "devices": list(spec.devices),
            "phase": one.phase.value,
            "reason": one.reason,
            "incarnation": one.instance.incarnation if one.instance is not None else "",
            "pid": one.pid,
            "restarts": one.restarts,
            "up_s": round(one.up_s, 1),
            "in_flight": under_way(self._doors, one.order.id),
        }
