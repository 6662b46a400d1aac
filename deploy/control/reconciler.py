"""Makes a deployment what is wanted of it: after every event it asks the rules what may begin now, and begins it.

Level-triggered: nothing is planned ahead, so that an interruption, a failure, an undo or a new controller needs no code
of its own; the next look sees what there is. What is decided is `deploy/change`'s business, what runs the runtime's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.change.match import given_up
from deploy.change.serving import required
from deploy.change.types import Action, Actual, Drain, Flip, Leave, Pause, Resume, Shortage, Start, Stop, Wanted
from deploy.change.wave import reached, wave
from deploy.control.doors import Doors
from deploy.control.journal import DEPTH, Journal, Record
from deploy.control.occupancy import under_way, until_empty, until_quiet
from deploy.control.overlay import Overlay
from deploy.control.progress import Change, State
from deploy.control.refusals import shortage_text
from deploy.runtime.protocol import Observed, Order, Phase, Runtime
from epd_serve.errors import ConfigError, EpdError, StageError

logger = logging.getLogger(__name__)
PAST = 10
"""Changes that are remembered for `status`."""


@dataclass(frozen=True)
class Deadlines:
    """Of each action, seconds.

    Attributes:
        start_s: from a start to the first answer. drain_s: for what is under way on an instance that goes or flips.
        stop_s: from SIGTERM to SIGKILL. call_s: for the runtime to accept a call.
        retry_s: from a call that was lost to its repetition. again_s: from a layout that cannot be reached to the next
            try; it doubles up to `again_max_s`.
        look_s: between looks for deadlines; everything else that happens is told.
    """

    start_s: float = 900.0
    drain_s: float = 30.0
    stop_s: float = 8.0
    call_s: float = 20.0
    retry_s: float = 0.5
    again_s: float = 5.0
    again_max_s: float = 60.0
    look_s: float = 0.5


class Reconciler:
    """Runs in one event loop; `begin` and the attributes are for others in that loop.

    Args:
        wanted: what to start with. record: what a controller before this one has left.
        staging_bytes, arena_bytes: as of `Actual`.
        say: takes a line for the operator.

    Attributes:
        overlay: all instances there are. layouts: that were wanted, the present one last.
        change: under way, or None. past: those that are over, latest last.
        trouble: why what is wanted is not there and nothing is under way, or "".
    """

    def __init__(
        self,
        runtime: Runtime,
        doors: Doors,
        journal: Journal,
        wanted: Wanted,
        *,
        deadlines: Deadlines | None = None,
        staging_bytes: int = 0,
        arena_bytes: int = 0,
        say: Callable[[str], None] = lambda line: None,
        record: Record | None = None,
    ) -> None:
        self._runtime = runtime
        self._doors = doors
        self._journal = journal
        self._deadlines = deadlines or Deadlines()
        self._staging_bytes, self._arena_bytes = staging_bytes, arena_bytes
        self._say = say
        self.wanted = wanted
        self.layouts: tuple[str, ...] = record.layouts if record is not None else (wanted.layout,)
        self.overlay = Overlay(record.unwanted if record is not None else ())
        self.change: Change | None = Change(0, "start", "", wanted.layout)
        self.past: deque[Change] = deque(maxlen=PAST)
        self.trouble = ""
        self._previous: Wanted | None = None
        self._numbers = 0
        self._paused_at: float | None = None
        self._paused_until = 0.0
        self._again_at, self._again_s = 0.0, self._deadlines.again_s
        self._woken = asyncio.Event()
        self._over = asyncio.Event()
        if record is not None:
            self.change = Change(0, "adopt", "", wanted.layout, required=frozenset(record.required))
            if record.paused_until > time.time():
                self._paused_at, self._paused_until = time.monotonic(), record.paused_until

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
            self.overlay.cancel()

    async def look(self) -> None:
        """Ask the runtime for its nodes again: room and times of starts are what they are now."""
        self.overlay.nodes = await self._runtime.nodes()

    @property
    def instances(self) -> tuple[Observed, ...]:
        """As the runtime saw them last."""
        return self.overlay.instances or ()

    def begin(self, what: str, wanted: Wanted, *, pause_s: float = 0.0, unwanted: Sequence[str] = ()) -> Change:
        """From now on this is wanted. What was under way is left as it is, and goes on from there.

        Args:
            pause_s: new requests may wait so long in it.
            unwanted: ids that are to be replaced although their like is wanted, one after another.
        """
        if self.change is not None:
            self._end(State.UNDONE)
        self._numbers += 1
        self._previous, self.wanted = self.wanted, wanted
        if wanted.layout != self.layouts[-1]:
            self.layouts = (*self.layouts, wanted.layout)[-DEPTH:]
        self.overlay.unwanted = tuple(unwanted)
        self._fresh()
        actual = self.actual()
        self.change = Change(
            self._numbers, what, self._previous.layout, wanted.layout, pause_s, required(wanted, actual)
        )
        self._over.clear()
        self._write()
        self._publish()
        self._woken.set()
        return self.change

    async def over(self) -> None:
        """Wait until no change is under way; whoever waits sets the deadline."""
        while self.change is not None:
            await self._over.wait()

    @property
    def paused_s(self) -> float:
        """For how long new requests still wait; 0 while they do not."""
        return max(0.0, self._paused_until - time.time()) if self._paused_at is not None else 0.0

    def actual(self, unwanted: Sequence[str] = ()) -> Actual:
        """What there is, for the rules; `unwanted` as of `Overlay.actual`."""
        return self.overlay.actual(
            unwanted,
            required=self.change.required if self.change is not None else frozenset(),
            paused=self._paused_at is not None,
            staging_bytes=self._staging_bytes,
            arena_bytes=self._arena_bytes,
        )

    # What the runtime says.

    async def _watch(self) -> None:
        while True:
            try:
                async for instances in self._runtime.watch():
                    self._take_in(instances)
            except Exception:
                logger.exception("the runtime cannot be watched")
            await asyncio.sleep(self._deadlines.retry_s)

    def _take_in(self, instances: tuple[Observed, ...]) -> None:
        flipped = self.overlay.take_in(instances)
        self._publish()
        for name in flipped:
            self._doors.take_back(name)
        for one in instances:
            name = one.order.id
            if one.phase is Phase.DRAINING and name not in self.overlay.emptying:
                self._empty(name)  # a controller before this one has asked for it
            if one.phase is Phase.DOWN and name in self.overlay.emptying:  # it has ended by itself
                self.overlay.emptying[name].cancel()
        if self.change is not None:
            self._follow(self.change, {one.order.id: one for one in instances})
        self._woken.set()

    def _follow(self, change: Change, there: dict[str, Observed]) -> None:
        """What has come of the change's steps."""
        for name in change.started:
            one = there.get(name)
            if one is not None and one.phase is Phase.UP:
                change.close(Start, name)
            if one is not None and given_up(one) and name not in change.failed:
                change.failed[name] = one.reason
                change.close(Start, name, one.reason)
        for step in change.steps:
            if isinstance(step.action, Stop | Drain) and step.action.id not in there:
                step.close()
            if isinstance(step.action, Flip) and step.action.id not in self.overlay.flipped:
                step.close()

    def _publish(self) -> None:
        if self.overlay.instances is not None:
            self._doors.publish(self.overlay.instances, {spec.role for spec in self.wanted.specs})

    # What is done about it.

    async def _turns(self) -> None:
        while True:
            self._woken.clear()
            try:
                wait_s = await self._turn() if self.overlay.instances is not None else None
            except EpdError:
                raise
            except Exception:  # a defect of ours: what runs goes on running, and the next look may do better
                logger.exception("what is to be done cannot be found out")
                wait_s = self._deadlines.retry_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._woken.wait()

    async def _turn(self) -> float | None:
        """One look. Returns for how long there is nothing to look at unless somebody says so."""
        change, wanted, now = self.change, self.wanted, time.monotonic()
        if self.trouble and now < self._again_at:
            return self._again_at - now
        actual = self.actual()
        if change is not None and (why := self._why_failed(change, actual)):
            self._fail(change, why)
            return 0.0
        if change is None and reached(wanted, actual) and not actual.paused:
            self.trouble = ""
            return None
        decided = wave(wanted, actual, may_pause=change is not None and change.pause_s > 0)
        if isinstance(decided, Shortage):
            if change is not None:
                self._fail(change, shortage_text(decided))
            else:
                self._wait_in_trouble(shortage_text(decided))
            return 0.0
        for action in decided:
            if self.wanted is not wanted:  # somebody wants something else by now
                return 0.0
            if not await self._carry_out(action):
                return self._deadlines.retry_s
        if not decided and reached(wanted, self.actual()) and self._paused_at is None:
            self._reach()
            return None
        return self._deadlines.look_s

    async def _carry_out(self, action: Action) -> bool:
        """False when the runtime could not be told; the next look decides again."""
        change = self.change
        step = change.begin(action) if change is not None else None
        try:
            async with asyncio.timeout(self._deadlines.call_s):
                await self._do(action)
        except ConfigError as error:
            if change is None:
                self._wait_in_trouble(error.message)
            else:
                self._fail(change, error.message)
            return False
        except Exception as error:  # noqa: BLE001 - a call that was lost may have taken effect: all of them can be repeated
            logger.warning("%s was not accepted: %s", action, error or type(error).__name__)
            if step is not None:
                step.note = str(error)
            return False
        return True

    async def _do(self, action: Action) -> None:
        match action:
            case Start(name, spec):
                self._stay(name)
                await self._runtime.start(Order(name, spec))
                self._note_started(name, spec_up=Observed(Order(name, spec), Phase.STARTING))
            case Drain(name):
                await self._runtime.drain(name)
                self._empty(name)
            case Stop(name):
                if name not in self.overlay.stopping:
                    self.overlay.stopping[name] = asyncio.create_task(self._stop(name), name=f"stop {name}")
            case Leave(name):
                self._doors.drain(name)
                self.overlay.leaving[name] = self._awaited(until_quiet(self._doors, name))
            case Flip(name, role):
                await self._runtime.flip(name, role)
                self._close(Leave, name)
                if (leaving := self.overlay.leaving.pop(name, None)) is not None:
                    leaving.cancel()
                self.overlay.flipped[name] = role
                self._take_in(self.instances)  # it may have been seen
            case Pause():
                assert self.change is not None, "only a change pauses"
                self._paused_at = time.monotonic()
                self._paused_until = time.time() + self.change.pause_s
                self._write()
                self._doors.pause(self.change.pause_s)
            case Resume():
                self._resume()
                self._close(Pause, "")
                self._close(Resume, "")

    def _close(self, kind: type[Action], name: str) -> None:
        if self.change is not None:
            self.change.close(kind, name)

    def _note_started(self, name: str, spec_up: Observed) -> None:
        if self.change is not None:
            self.change.started.setdefault(name, time.monotonic())
        if all(one.order.id != name for one in self.instances):
            self.overlay.started[name] = spec_up

    def _stay(self, name: str) -> None:
        """One that drains is taken back."""
        if (emptying := self.overlay.emptying.pop(name, None)) is not None:
            emptying.cancel()
            self._doors.take_back(name)

    def _empty(self, name: str) -> None:
        self._doors.drain(name)
        if name not in self.overlay.emptying:
            self.overlay.emptying[name] = self._awaited(self._until_empty(name))

    async def _until_empty(self, name: str) -> None:
        try:
            async with asyncio.timeout(self._deadlines.drain_s):
                await until_empty(self._doors, name)
        except TimeoutError:
            cut = under_way(self._doors, name)
            self._say(f"{name} had {self._deadlines.drain_s:g} s to drain (--drain-s): {cut} requests are cut off")
            if self.change is not None:
                self.change.cut += cut
        self._close(Drain, name)

    async def _stop(self, name: str) -> None:
        try:
            async with asyncio.timeout(self._deadlines.stop_s + self._deadlines.call_s):
                await self._runtime.stop(name, self._deadlines.stop_s)
        except Exception as error:  # noqa: BLE001 - asked for again at the next look
            logger.warning("%s could not be stopped: %s", name, error or type(error).__name__)
            await asyncio.sleep(self._deadlines.retry_s)
            self.overlay.stopping.pop(name, None)
            self._woken.set()

    def _awaited(self, what: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(what)
        task.add_done_callback(lambda _: self._woken.set())
        return task

    def _resume(self) -> None:
        if self._paused_at is None:
            return
        if self.change is not None:
            self.change.paused_s += time.monotonic() - self._paused_at
        self._paused_at, self._paused_until = None, 0.0
        self._write()
        self._doors.resume()

    # How a change ends.

    def _why_failed(self, change: Change, actual: Actual) -> str:
        """Why it will not come to its end, or ""."""
        now, up = time.monotonic(), {one.order.id for one in actual.instances if one.phase is Phase.UP}
        first = change.what == "start"
        if first:
            change.failed |= {one.order.id: one.reason for one in actual.instances if given_up(one)}
        if len(change.failed) >= (1 if first else 2):
            name, why = next(reversed(change.failed.items()))
            return f"{name} did not start: {why}"
        if first:  # each start has its deadline in the agent, from its turn on; there may be many turns
            return ""
        late = [name for name, began in change.started.items() if now > began + self._deadlines.start_s]
        if late := [name for name in late if name not in up and any(one.order.id == name for one in actual.instances)]:
            return f"{late[0]} is not up after {self._deadlines.start_s:g} s (--startup-timeout-s)"
        if now > change.moved + self._deadlines.start_s + self._deadlines.drain_s:
            return f"nothing has moved for {now - change.moved:.0f} s"
        overdue = [name for name, task in self.overlay.leaving.items() if not task.done()]
        if overdue and now > change.moved + self._deadlines.drain_s:
            return f"{overdue[0]} has prefills that do not end within {self._deadlines.drain_s:g} s (--drain-s)"
        return ""

    def _fail(self, change: Change, why: str) -> None:
        """Once it goes back; what then fails as well is said, and tried again."""
        if change.what == "start":
            failed = next(reversed(change.failed), "")
            raise StageError(f"stage {why}", stage=failed) if failed else ConfigError(f"{self.wanted.layout}: {why}")
        if change.state is State.UNDER_WAY and self._previous is not None:
            self._say(f"{change.what} to {change.layout} failed: {why}; going back to {change.before}")
            change.state, change.reason = State.REVERTING, why
            self.wanted = self._previous
            if self.layouts[-1] != change.before:
                self.layouts = self.layouts[:-1]
            self.overlay.unwanted = ()
            self._fresh()
            change.started.clear()
            change.failed.clear()
            change.moved = time.monotonic()
            self._write()
            self._publish()
        else:
            change.reason = f"{change.reason}; and the way back: {why}"
            self._end(State.FAILED)
            self._wait_in_trouble(why)

    def _fresh(self) -> None:
        """Who was to leave may stay; the next look decides."""
        self.trouble, self._again_s = "", self._deadlines.again_s
        for name, task in tuple(self.overlay.leaving.items()):
            task.cancel()
            del self.overlay.leaving[name]
            self._doors.take_back(name)

    def _wait_in_trouble(self, why: str) -> None:
        if why != self.trouble:
            self._say(f"{self.wanted.layout} is not reached: {why}; tried again every {self._again_s:g} s")
        self.trouble = why
        self._again_at = time.monotonic() + self._again_s
        self._again_s = min(self._deadlines.again_max_s, 2 * self._again_s)

    def _reach(self) -> None:
        change = self.change
        self.trouble = ""
        if change is not None:
            self._end(State.FAILED if change.state is State.REVERTING else State.DONE)

    def _end(self, state: State) -> None:
        change = self.change
        assert change is not None, "nothing is under way"
        change.end(state)
        self.past.append(change)
        self.change = None
        self._over.set()
        self._write()

    def _write(self) -> None:
        self._journal.write(
            Record(
                self.layouts,
                tuple(sorted(self.change.required)) if self.change is not None else (),
                self.overlay.unwanted,
                self._paused_until,
            )
        )
