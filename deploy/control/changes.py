"""Changes of a deployment: what was asked for, what was done, how long each step took, how it ended, and when it has
failed; and the record of it that the next controller reads."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import msgspec

from deploy.change.types import Action, Actual, Flip, Pause, Resume, Share, Start
from deploy.host import state
from deploy.runtime.protocol import Observed, Phase
from epd_serve.errors import ConfigError, EpdError, StageError

RECORD = "wanted"
"""The section of the state that has the record."""

DEPTH = 16
"""Layouts that are remembered for `undo`."""

PAST = 10
"""Changes that are remembered for `status`."""

REPLACE = "replace"
"""The word of a change that nobody has asked for: what was lost with its node comes again elsewhere."""

ACTIONS = ("start", "flip", "share", "leave", "drain", "stop", "pause", "resume")


class State(StrEnum):
    UNDER_WAY = "under way"
    REVERTING = "reverting"
    DONE = "done"
    FAILED = "failed"
    UNDONE = "undone"

    @property
    def over(self) -> bool:
        return self not in (State.UNDER_WAY, State.REVERTING)


@dataclass
class Step:
    """One action.

    Attributes:
        action: as `action_json` tells it.
        seconds: None while it is under way. done: it came to what it was for.
    """

    action: dict[str, Any]
    began: float
    seconds: float | None = None
    note: str = ""
    done: bool = False

    @property
    def word(self) -> str:
        return str(self.action["action"])

    def end(self, note: str = "") -> None:
        if self.seconds is None:
            self.seconds, self.note, self.done = time.monotonic() - self.began, note or self.note, not note


@dataclass
class Change:
    """From one wanted layout to another. Times are of `time.monotonic`, those of a record in seconds since the epoch,
    for the next controller may run on another machine.

    Attributes:
        what: the command's word. before, layout: from which to which.
        pause_s: how long new requests may wait in it; 0 where they may not.
        moved: when a step has begun or ended. failed: ids whose start came to nothing, and why.
        cut: requests that were still running when an instance's time to drain was over.
        paused_s: how long new requests have waited in it.
    """

    number: int
    what: str
    before: str
    layout: str
    pause_s: float = 0.0
    state: State = State.UNDER_WAY
    reason: str = ""
    began: float = field(default_factory=time.monotonic)
    moved: float = field(default_factory=time.monotonic)
    seconds: float | None = None
    paused_s: float = 0.0
    cut: int = 0
    steps: list[Step] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    def begin(self, action: Action) -> Step | None:
        """A step of its own, unless the same one is under way: an action that was lost is asked for again."""
        what = action_json(action)
        if any(step.action == what for step in self.under_way):
            return None
        self.moved = time.monotonic()
        self.steps.append(step := Step(what, self.moved))
        return step

    @property
    def under_way(self) -> list[Step]:
        return [step for step in self.steps if step.seconds is None]

    def follow(self, actual: Actual, unseen: Container[str]) -> None:
        """End the steps that have come to something. `unseen`: ids whose flip the runtime has yet to show."""
        there = {one.order.id: one for one in actual.instances}
        for step in self.under_way:
            one = there.get(step.action.get("instance", ""))
            if step.word == "start" and one is not None and one.over:
                self.failed[one.order.id] = one.reason
                step.end(one.reason)
            elif _has_come(step, one, actual, unseen):
                step.end()
            if step.seconds is not None:
                self.moved = time.monotonic()

    def revert(self, why: str) -> None:
        """Its way goes back now, for this reason."""
        self.state, self.reason, self.moved = State.REVERTING, why, time.monotonic()
        self.failed.clear()
        self.give_up("start", "leave")

    def give_up(self, *words: str) -> None:
        """Steps of these kinds that are under way are not for anything any more."""
        for step in self.under_way:
            if step.word in words:
                step.end("not finished")

    def end(self, state: State) -> None:
        self.state, self.seconds = state, time.monotonic() - self.began
        for step in self.steps:
            step.end("" if state is State.DONE else "not finished")


class Changes:
    """Args:
    latest: under way, or over.

    Attributes:
    present: the one under way, or None. past: those that are over, latest last.
    ended: how many are over in this life, by command and how they ended.
    """

    def __init__(self, latest: Change) -> None:
        over = latest.state.over
        self.present: Change | None = None if over else latest
        self.past: deque[Change] = deque([latest] if over else [], maxlen=PAST)
        self.ended: Counter[tuple[str, str]] = Counter()
        self._actions: Counter[tuple[str, str]] = Counter()
        self._over = asyncio.Event()

    @property
    def latest(self) -> Change:
        return self.present if self.present is not None else self.past[-1]

    def begin(self, change: Change) -> None:
        assert self.present is None, "another one is under way"
        self.present = change
        self._over.clear()

    def end(self, state: State) -> None:
        change = self.present
        assert change is not None, "nothing is under way"
        change.end(state)
        self.ended[change.what, state.value] += 1
        self._actions += _outcomes(change)
        self.past.append(change)
        self.present = None
        self._over.set()

    def actions(self) -> Counter[tuple[str, str]]:
        """How many have ended in this life, by word and outcome: `done` or `failed`."""
        return self._actions + (_outcomes(self.present) if self.present is not None else Counter())

    async def over(self) -> None:
        """Wait until none is under way; whoever waits sets the deadline."""
        while self.present is not None:
            await self._over.wait()


def _has_come(step: Step, one: Observed | None, actual: Actual, unseen: Container[str]) -> bool:
    """Whether there is what a step was for. `one`: the instance that it is about, if that is there."""
    match step.word:
        case "start":
            return one is not None and one.phase is Phase.UP
        case "flip":
            return one is None or one.order.id not in unseen
        case "share":
            return one is None or list(one.order.spec.cores) == step.action["cores"]
        case "leave":
            return one is None or one.order.id not in actual.leaving
        case "drain":
            return one is None or one.order.id in actual.empty
        case "stop":
            return one is None
        case _:
            return not actual.paused


def _outcomes(change: Change) -> Counter[tuple[str, str]]:
    ended = [step for step in change.steps if step.seconds is not None]
    return Counter((step.word, "done" if step.done else "failed") for step in ended)


def action_json(action: Action) -> dict[str, Any]:
    """An action in words for programs."""
    told: dict[str, Any] = {"action": type(action).__name__.lower()}
    if not isinstance(action, Pause | Resume):
        told["instance"] = action.id
    if isinstance(action, Start):
        spec = action.spec
        told |= {"role": spec.role.value, "node": spec.node, "devices": list(spec.devices)}
    if isinstance(action, Share):
        told["cores"] = list(action.spec.cores)
    if isinstance(action, Flip):
        told["role"] = action.role.value
    return told


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the next controller has to know of what was wanted.

    Attributes:
        layouts: that were wanted, the present one last.
        change: the latest, if there was one, without its steps.
        unwanted: ids of instances that are to be replaced although their like is wanted.
        paused_until: seconds since the epoch, 0 while requests do not wait.
        core_share: that is wanted, where it is not that of the launch.
    """

    layouts: tuple[str, ...]
    change: Change | None = None
    unwanted: tuple[str, ...] = ()
    paused_until: float = 0.0
    core_share: str | None = None


class Journal:
    """The record, replaced as a whole."""

    def __init__(self, notes: state.State) -> None:
        self._notes = notes

    def read(self) -> Record | None:
        """The last one; None before the first. What is late in its change is so from now on.

        Raises:
            msgspec.DecodeError: somebody else wrote there.
        """
        content = self._notes.read(RECORD)
        record = msgspec.json.decode(content, type=Record) if content is not None else None
        if record is not None and record.change is not None:
            record.change.began -= _since_epoch()
            record.change.moved = time.monotonic()
        return record

    def write(self, record: Record) -> None:
        if (change := record.change) is not None:
            bare = replace(change, began=change.began + _since_epoch(), steps=[], failed={})
            record = msgspec.structs.replace(record, change=bare)
        self._notes.write(RECORD, msgspec.json.encode(record))

    async def kept(self) -> None:
        """Returns when what was written is sure to be found."""
        await self._notes.kept()


def _since_epoch() -> float:
    """Seconds from the epoch to the zero of `time.monotonic`."""
    return time.time() - time.monotonic()


@dataclass(frozen=True)
class Deadlines:
    """Of each action, seconds.

    Attributes:
        start_s: from a start to the first answer. drain_s: for what is under way on an instance that goes or flips.
        stop_s: from SIGTERM to SIGKILL. call_s: for the runtime to accept a call.
        retry_s: from a call that was lost to its repetition. again_s: from a layout that cannot be reached to the next
            try; it doubles up to `again_max_s`.
        look_s: between looks for deadlines; everything else that happens is told.
        place_s: for a node that is gone to come back, or its devices to be found elsewhere, in a change.
    """

    start_s: float = 900.0
    drain_s: float = 30.0
    stop_s: float = 8.0
    call_s: float = 20.0
    retry_s: float = 0.5
    again_s: float = 5.0
    again_max_s: float = 60.0
    look_s: float = 0.5
    place_s: float = 60.0


def why_failed(change: Change, actual: Actual, not_quiet: Sequence[str], deadlines: Deadlines) -> str:
    """Why it will not come to its end, or "". Those whose first start has failed are noted in `change.failed`.

    Args:
        not_quiet: ids of those that are to leave and have prefills that have yet to end.
    """
    now, first = time.monotonic(), change.what == "start"
    if first:
        change.failed |= {one.order.id: one.reason for one in actual.instances if one.over}
    if len(change.failed) >= (1 if first else 2):
        name, why = next(reversed(change.failed.items()))
        return f"{name} did not start: {why}"
    if first:  # each start has its deadline in the agent, from its turn on; there may be many turns
        return ""
    there = {one.order.id for one in actual.instances}
    for step in change.under_way:
        name = step.action.get("instance", "")
        if step.word == "start" and name in there and now > step.began + deadlines.start_s:
            return f"{name} is not up after {deadlines.start_s:g} s (--startup-timeout-s)"
    if now > change.moved + deadlines.start_s + deadlines.drain_s:
        return f"nothing has moved for {now - change.moved:.0f} s"
    if not_quiet and now > change.moved + deadlines.drain_s:
        return f"{not_quiet[0]} has prefills that do not end within {deadlines.drain_s:g} s (--drain-s)"
    return ""


def start_failed(change: Change, why: str) -> EpdError:
    """What ends a launch whose first start has failed."""
    failed = next(reversed(change.failed), "")
    return StageError(f"stage {why}", stage=failed) if failed else ConfigError(f"{change.layout}: {why}")
