"""Makes a deployment what is wanted of it: after every event it asks the rules what may begin now, and begins it.

Level-triggered: nothing is planned ahead, so that an interruption, a failure, an undo or a new controller needs no code
of its own; the next look sees what there is. What is decided is `deploy/change`'s business, what runs the runtime's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from deploy.change.limits import required
from deploy.change.types import Action, Actual, Flip, Shortage, Start, Wanted
from deploy.change.wave import reached, wave
from deploy.control.actuator import Actuator, Doors
from deploy.control.changes import (
    DEPTH,
    REPLACE,
    Change,
    Changes,
    Deadlines,
    Journal,
    Record,
    State,
    action_json,
    start_failed,
    why_failed,
)
from deploy.control.refusals import shortage_text
from deploy.runtime.protocol import Node, Observed, Runtime, Spec
from epd_serve.errors import ConfigError, EpdError

logger = logging.getLogger(__name__)


class Reconciler:
    """Runs in one event loop; `begin` and the attributes are for others in that loop.

    Args:
        wanted: what to start with.
        record: what a controller before this one has left. previous: what was wanted before the change in it.
        say: takes a line for the operator.

    Attributes:
        layouts: that were wanted, the present one last. changes: to get there.
        trouble: why what is wanted is not there and nothing is under way; "" while there is none.
        deadlines: as given.
    """

    def __init__(
        self,
        runtime: Runtime,
        doors: Doors,
        journal: Journal,
        wanted: Wanted,
        *,
        deadlines: Deadlines | None = None,
        say: Callable[[str], None] = lambda line: None,
        record: Record | None = None,
        previous: Wanted | None = None,
    ) -> None:
        record = record or Record((wanted.layout,))
        latest = record.change or Change(0, "start", "", wanted.layout)
        self._runtime = runtime
        self._journal = journal
        self.deadlines = deadlines or Deadlines()
        self._say = say
        self.wanted = wanted
        self.layouts = record.layouts
        self.changes = Changes(latest)
        self.trouble = ""
        self._again_at, self._again_s = 0.0, self.deadlines.again_s
        self._previous = previous
        self._number = latest.number
        self._woken = asyncio.Event()
        self._actuator = Actuator(
            runtime,
            doors,
            self.changes,
            self.deadlines,
            wake=self._woken.set,
            write=self._kept,
            say=say,
            record=record,
        )

    async def run(self) -> None:
        """Until cancelled.

        Raises:
            StageError: the first start has failed. ConfigError: there is no room for it.
        """
        await self.look()
        self._write()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch())
                group.create_task(self._turns())
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        finally:
            self._actuator.cancel()

    async def look(self) -> None:
        """Ask the runtime for its nodes again: room and times of starts are what they are now."""
        await self._actuator.look()

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self._actuator.nodes

    @property
    def instances(self) -> tuple[Observed, ...]:
        """As the runtime saw them last; none before its first word."""
        return self._actuator.instances or ()

    @property
    def knows(self) -> bool:
        """The runtime has said what there is."""
        return self._actuator.instances is not None

    def begin(self, what: str, wanted: Wanted, *, pause_s: float = 0.0, unwanted: Sequence[str] = ()) -> Change:
        """From now on this is wanted. What was under way is left as it is, and goes on from there.

        Args:
            pause_s: new requests may wait so long in it.
            unwanted: ids that are to be replaced although their like is wanted, one after another.
        """
        if self.changes.present is not None:
            self.changes.end(State.UNDONE)
        self._number += 1
        self._previous, before = self.wanted, self.wanted.layout
        if wanted.layout != self.layouts[-1]:
            self.layouts = (*self.layouts, wanted.layout)[-DEPTH:]
        change = Change(self._number, what, before, wanted.layout, pause_s)
        self.changes.begin(change)
        self._want(wanted, unwanted)
        return change

    def aim_anew(self, wanted: Wanted) -> None:
        """The same layout on the places that there are now: a change of its own, from which there is no way back, or
        the rest of the one under way."""
        before, self.wanted = self.wanted, wanted
        if wanted.waits and wanted.waits != before.waits:
            self._say(f"{wanted.layout} is not whole: it waits for {wanted.waits}")
        comes, goes = (Counter(one.specs) - Counter(other.specs) for one, other in ((wanted, before), (before, wanted)))
        if comes and self.changes.present is None:
            self.begin(REPLACE, wanted)
            self._previous = None
        elif comes or goes:
            if self.changes.present is not None:
                self.changes.present.moved = time.monotonic()
                self.changes.present.give_up("leave")
            self._want(wanted, self._actuator.unwanted)

    @property
    def used(self) -> list[Spec]:
        """Of the instances there are, and of those to which the change under way may go back."""
        back = self._previous.specs if self._previous is not None and self.changes.present is not None else ()
        return [*(one.order.spec for one in self.actual().instances), *back]

    @property
    def paused_s(self) -> float:
        """For how long new requests still wait; 0 while they do not."""
        return self._actuator.paused_s

    def actual(self, unwanted: Sequence[str] = ()) -> Actual:
        """What there is, for the rules; `unwanted` as of `Actuator.actual`."""
        there = self._actuator.actual(unwanted)
        return replace(there, required=required(self.wanted, there))

    def _want(self, wanted: Wanted, unwanted: Sequence[str]) -> None:
        """Who was to leave may stay; the next look decides."""
        self.wanted = wanted
        self._actuator.unwanted = tuple(unwanted)
        self._actuator.stay_all()
        self.trouble, self._again_s = "", self.deadlines.again_s
        self._write()
        self._actuator.publish(wanted.roles)
        self._woken.set()

    # What is done about it.

    async def _watch(self) -> None:
        while True:
            try:
                async for instances in self._runtime.watch():
                    self._take_in(instances)
            except Exception:
                logger.exception("the runtime cannot be watched")
            await asyncio.sleep(self.deadlines.retry_s)

    def _take_in(self, instances: tuple[Observed, ...]) -> None:
        self._actuator.take_in(instances, self.wanted.roles)
        if self.changes.present is not None:
            self.changes.present.follow(self.actual(), self._actuator.unseen)

    async def _turns(self) -> None:
        while True:
            self._woken.clear()
            try:
                wait_s = await self._turn() if self.knows else None
            except EpdError:
                raise
            except Exception:  # a defect of ours: what runs goes on running, and the next look may do better
                logger.exception("what is to be done cannot be found out")
                wait_s = self.deadlines.retry_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._woken.wait()

    async def _turn(self) -> float | None:
        """One look. Returns for how long there is nothing to look at unless somebody says so."""
        if self.trouble and (wait_s := self._again_at - time.monotonic()) > 0:
            return wait_s
        if not self._has_nodes_of(self.wanted):
            await self._look_again()
        change, wanted = self.changes.present, self.wanted
        actual = self.actual()
        if change is not None:
            change.follow(actual, self._actuator.unseen)
        if change is not None and (why := why_failed(change, actual, self._actuator.not_quiet(), self.deadlines)):
            return self._fail(change, why)
        if reached(wanted, actual) and not actual.paused:
            self._reach()
            return None
        decided = wave(wanted, actual, may_pause=change is not None and change.pause_s > 0)
        if isinstance(decided, Shortage):
            if (
                decided.what == "node"
                and change is not None
                and time.monotonic() < change.moved + self.deadlines.place_s
            ):
                return self.deadlines.look_s  # it is aimed anew, or the node comes
            return self._fail(change, shortage_text(decided))
        accepted = True
        for action in decided:
            if self.wanted is not wanted:  # somebody wants something else by now
                return 0.0
            if not await self._carry_out(action, wanted):
                accepted = False
                if not self._is_new(action):  # what follows may count on it
                    break
        return self.deadlines.look_s if accepted else self.deadlines.retry_s

    async def _carry_out(self, action: Action, wanted: Wanted) -> bool:
        """False when the runtime could not be told; the next look decides again."""
        change = self.changes.present
        step = change.begin(action) if change is not None else None
        try:
            await self._actuator.do(action)
        except ConfigError as error:
            await self._look_again()
            if self.wanted is wanted and self._has_nodes_of(wanted):
                self._fail(change, error.message)
            return False
        except Exception as error:  # noqa: BLE001 - a call that was lost may have taken effect: all of them can be repeated
            logger.warning("%s was not accepted: %s", action_json(action), error or type(error).__name__)
            if step is not None:
                step.note = str(error)
            return False
        if isinstance(action, Flip):
            self._take_in(self.instances)  # it may have been seen
        return True

    def _is_new(self, action: Action) -> bool:
        return isinstance(action, Start) and all(one.order.id != action.id for one in self.instances)

    def _has_nodes_of(self, wanted: Wanted) -> bool:
        return {spec.node for spec in wanted.specs} <= {node.id for node in self.nodes}

    async def _look_again(self) -> None:
        with contextlib.suppress(TimeoutError, EpdError):
            async with asyncio.timeout(self.deadlines.call_s):
                await self.look()

    # How a change ends.

    def _reach(self) -> None:
        self.trouble = ""
        if (change := self.changes.present) is not None:
            self.changes.end(State.FAILED if change.state is State.REVERTING else State.DONE)
            self._write()

    def _fail(self, change: Change | None, why: str) -> float:
        """A change goes back once; what then fails as well, or fails without a change, is said, and tried again, less
        often each time. Returns when to look again."""
        if change is not None and change.what == "start":
            raise start_failed(change, why)
        if change is not None and change.state is State.UNDER_WAY and self._previous is not None:
            self._say(f"{change.what} to {change.layout} failed: {why}; going back to {change.before}")
            change.revert(why)
            if self.layouts[-1] != change.before:
                self.layouts = self.layouts[:-1]
            self._want(self._previous, ())
            return 0.0
        if change is not None:
            change.reason = f"{change.reason}; and the way back: {why}" if change.reason else why
            self.changes.end(State.FAILED)
            self._write()
        if why != self.trouble:
            self._say(f"{self.wanted.layout} is not reached: {why}; tried again every {self._again_s:g} s")
        self.trouble = why
        self._again_at = time.monotonic() + self._again_s
        self._again_s = min(self.deadlines.again_max_s, 2 * self._again_s)
        return 0.0

    def _write(self) -> None:
        actuator = self._actuator
        record = Record(
            self.layouts, self.changes.latest, actuator.unwanted, actuator.paused_until, self.wanted.core_share
        )
        self._journal.write(record)

    async def _kept(self) -> None:
        self._write()
        await self._journal.kept()
