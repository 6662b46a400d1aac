"""The commands on a running deployment. Each is checked to its end before anything is touched, and then begun.

What is begun goes on without whoever asked (`reconciler.py`); how far it is, `status` and `change` tell.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol

from deploy.change.limits import kinds, required
from deploy.change.scaling import scaled
from deploy.change.types import Plan, Shortage, Wanted
from deploy.change.wave import diff
from deploy.control.actuator import Doors
from deploy.control.aim import Aim
from deploy.control.changes import REPLACE, Change, action_json
from deploy.control.places import Places
from deploy.control.reconciler import Reconciler
from deploy.control.refusals import RefusedError, change_under_way, no_devices, pause_too_long, pause_too_short, short
from deploy.control.status import Json, change_json, status_json
from deploy.runtime.leases import LeaseError
from deploy.runtime.protocol import Observed, Spec
from epd_serve.errors import EpdError, NotFoundError
from epd_serve.roles import Role

FOLLOW = "follow"
"""The word of a change that the follower of the load has asked for."""

REFUSED_S = 300.0
"""For so long devices are wanted that a command has not got."""

TOLD = 20
"""Decisions of the follower in a status; `GET /deployment/decisions` has all that are remembered."""


class Following(Protocol):
    """Whether the load is followed, and what was decided (`deploy/follow/switch.py`)."""

    def told(self, most: int | None = None) -> Json:
        """The mode, and decisions, the newest first, at most so many."""

    async def set(self, mode: str) -> None:
        """To `off`, `advise` or `act`. Raises ConfigError: the deployment's settings allow no follower."""


class Controller:
    """In the reconciler's event loop.

    Args:
        launch: the deployment's id.
        aim: makes what is wanted of a layout's text and the specs of those that may stay.
        parts: pids of the processes that are no stages, by name. restarts: of those whose lives are counted.
        configure: has front doors that start from now on go by these `--proxy` options, too; raises ConfigError.

    Attributes:
        following: of the load.
    """

    def __init__(
        self,
        launch: str,
        reconciler: Reconciler,
        doors: Doors,
        aim: Aim,
        parts: Callable[[], Awaitable[Mapping[str, int]]],
        configure: Callable[[Sequence[str]], Awaitable[None]],
        following: Following,
        restarts: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._launch = launch
        self._reconciler = reconciler
        self._doors = doors
        self._aim = aim
        self._places = Places(aim, reconciler, look_s=reconciler.deadlines.again_s)
        self._parts = parts
        self._restarts = restarts
        self._configure = configure
        self.following = following
        self._restarting: asyncio.Task[None] | None = None
        self._refused: Sequence[int] = ()
        self._front_trouble = ""

    async def relayout(self, layout: str, *, dry_run: bool = False, pause_s: float = 0.0) -> Json:
        """Raises RefusedError, ConfigError, LayoutError."""
        return await self._relayout("relayout", layout, dry_run=dry_run, pause_s=pause_s)

    async def follow(self, layout: str, core_share: str = "") -> Json:
        """For the follower of the load. `core_share`: of stages that share a device, where it is to be another one; as
        `--core-share` has it. Raises as `relayout`."""
        return await self._relayout(FOLLOW, layout, core_share=core_share)

    @property
    def devices(self) -> int | None:
        """That this deployment has or could lease, as was last seen; None where nothing is lent."""
        if self._aim.leases is None:
            return None
        known = {node.id for node in self._aim.machines.nodes}
        leased = sum(place.width for place in self._places.leased if place.node in known)
        return leased + sum(count for node, count in self._places.free.items() if node in known)

    def want(self, widths: Sequence[int]) -> None:
        """As `Leases.want`, where anything is lent."""
        if self._aim.leases is not None:
            self._aim.leases.want(widths)

    def _want_for_a_while(self, widths: Sequence[int]) -> None:
        """What an operator could not get: he may try again when it has come."""
        self._refused = widths
        self.want(widths)

        def over() -> None:
            if self._refused is widths:
                self.want(())

        asyncio.get_running_loop().call_later(REFUSED_S, over)

    async def scale(self, counts: Mapping[Role, int], *, dry_run: bool = False, pause_s: float = 0.0) -> Json:
        """Raises as `relayout`."""
        switchable = any(spec.both for spec in self._reconciler.wanted.every)
        layout = scaled(self._reconciler.wanted.layout, counts, switchable=switchable)
        return await self._relayout("scale", layout, dry_run=dry_run, pause_s=pause_s)

    async def drain(self, name: str, *, dry_run: bool = False) -> Json:
        """The layout without this instance. Raises as `relayout`, and NotFoundError."""
        role = self._instance(name).order.spec.role
        count = sum(spec.role is role for spec in self._reconciler.wanted.every)
        layout = scaled(self._reconciler.wanted.layout, {role: count - 1})
        return await self._relayout("drain", layout, dry_run=dry_run, unwanted=(name,))

    async def restart(self, name: str = "", *, pause_s: float = 0.0) -> Json:
        """Another one in its place; without a name in the place of each, one after another. Raises as `drain`."""
        every = tuple(one.order.id for one in self._reconciler.instances)
        names = (self._instance(name).order.id,) if name else every
        self._check_idle()
        async with self._places.turn:
            await self._reconciler.look()
            wanted = self._reconciler.wanted
            plans = [self._plan(wanted, (one,), pause_s) for one in names]
            plan = Plan(tuple(wave for one in plans for wave in one.waves))
            return await self._begin("restart", wanted, plan, pause_s=pause_s, unwanted=names)

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

    async def undo(self, *, pause_s: float = 0.0) -> Json:
        """Back to the layout that was wanted before, also from the middle of a change. Raises as `relayout`."""
        reconciler, change = self._reconciler, self._reconciler.changes.present
        if change is not None and change.what != REPLACE and change.before == reconciler.wanted.layout:
            wanted = reconciler.wanted  # instances are being restarted: those that are left stay
            return self._answer(Plan(()), wanted, reconciler.begin("undo", wanted))
        if len(reconciler.layouts) < 2:
            raise RefusedError("there was no other layout before this one", "nothing_to_undo")
        return await self._relayout("undo", reconciler.layouts[-2], pause_s=pause_s)

    def change(self, number: int) -> Json | None:
        """Raises NotFoundError."""
        changes = self._reconciler.changes
        for one in (*changes.past, changes.present):
            if one is not None and one.number == number:
                return change_json(one)
        raise NotFoundError(f"there is no change {number}", code="unknown_change")

    async def status(self) -> Json:
        """What is wanted, what there is, and what is being done about it."""
        leased = self._places.leased if self._aim.leases is not None else None
        return {
            "launch": self._launch,
            **status_json(self._reconciler, self._doors, leased),
            "parts": {
                name: {"pid": pid, "restarts": self._restarts.get(name)} for name, pid in (await self._parts()).items()
            },
            "front": {"restarting": self._front_restarts, "trouble": self._front_trouble},
            "follow": self.following.told(TOLD),
        }

    async def keep_places(self) -> None:
        """For ever, beside the reconciler: what is leased and what is wanted stay in step (`places.py`)."""
        await self._places.keep()

    async def _relayout(
        self,
        what: str,
        layout: str,
        *,
        dry_run: bool = False,
        pause_s: float = 0.0,
        unwanted: tuple[str, ...] = (),
        core_share: str = "",
    ) -> Json:
        if not dry_run:
            self._check_idle(what)
        try:
            async with self._places.turn:
                await self._reconciler.look()
                stay = [one.order.spec for one in self._reconciler.instances if one.order.id not in unwanted]
                share = core_share or self._reconciler.wanted.core_share
                wanted = await self._aim(layout, stay, dry_run=dry_run, core_share=share)
                plan = self._plan(wanted, unwanted, pause_s)
                return await self._begin(what, wanted, plan, dry_run=dry_run, pause_s=pause_s, unwanted=unwanted)
        except LeaseError as error:
            if not dry_run:
                self._want_for_a_while(error.missing)
            raise no_devices(error, layout) from error
        finally:
            self._places.look_soon()  # where it was refused, what was leased for it is given back

    async def _begin(
        self, what: str, wanted: Wanted, plan: Plan, *, dry_run: bool = False, pause_s: float, unwanted: tuple[str, ...]
    ) -> Json:
        """Raises RefusedError where requests that wait in the pause would be too many, or something else has begun."""
        if plan.pauses and (most_s := await self._doors.pausable_s()) < pause_s:
            raise pause_too_long(pause_s, most_s)
        lost = kinds(self._reconciler.wanted.roles) - kinds(wanted.roles)
        notes = [f"{wanted.layout} does not serve requests of kind {kind}" for kind in sorted(lost)]
        change = None
        if not dry_run:
            self._check_idle(what)
            change = self._reconciler.begin(what, wanted, pause_s=pause_s, unwanted=unwanted)
        return self._answer(plan, wanted, change, notes)

    def _plan(self, wanted: Wanted, unwanted: Sequence[str], pause_s: float) -> Plan:
        """All of the change in advance. Raises RefusedError where it would get stuck."""
        actual = self._reconciler.actual(unwanted)
        actual = replace(actual, required=required(wanted, actual), leaving=frozenset(), quiet=frozenset())
        plan = diff(wanted, actual, may_pause=pause_s > 0)
        if isinstance(plan, Shortage):
            raise short(plan, wanted.layout)
        needed_s = plan.seconds(self._start_s, paused=True) if plan.pauses else None
        if needed_s is not None and needed_s > pause_s:
            raise pause_too_short(needed_s, pause_s)
        return plan

    def _answer(self, plan: Plan, wanted: Wanted, change: Change | None, notes: Sequence[str] = ()) -> Json:
        """What will be done, and for how long by experience. `change`: None where it was only asked for."""
        return {
            "layout": wanted.layout,
            "plan": {
                "waves": [[action_json(action) for action in wave] for wave in plan.waves],
                "pauses": plan.pauses,
                "expected_s": plan.seconds(self._start_s),
                "expected_pause_s": plan.seconds(self._start_s, paused=True) if plan.pauses else 0.0,
            },
            "notes": list(notes),
            "change": change_json(change),
        }

    def _start_s(self, spec: Spec) -> float | None:
        """How long such starts have taken on its node lately, or else on the slowest other one."""
        known = {node.id: node.start_s[spec.role] for node in self._reconciler.nodes if spec.role in node.start_s}
        return known.get(spec.node, max(known.values(), default=None))

    def _check_idle(self, what: str = "") -> None:
        """Whether a change with this word may begin: nothing is under way, or only what it may supersede. The follower
        may do so to what it has asked for itself."""
        change = self._reconciler.changes.present
        if change is not None and what != "undo" and not what == change.what == FOLLOW:
            raise change_under_way(change.what, change.layout)

    def _instance(self, name: str) -> Observed:
        for one in self._reconciler.instances:
            if one.order.id == name:
                return one
        there = ", ".join(one.order.id for one in self._reconciler.instances)
        raise NotFoundError(f"there is no instance {name!r}; there are {there}", code="unknown_instance")
