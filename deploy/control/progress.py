"""A change as it is told: what was asked for, what was done, how long each step took, how it ended."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from deploy.change.match import given_up
from deploy.change.types import Action, Drain, Flip, Leave, Pause, Plan, Resume, Start, Stop
from deploy.runtime.protocol import Observed, Phase

PAST = 10
"""Changes that are remembered for `status`."""

REPLACE = "replace"
"""The word of a change that nobody has asked for: what was lost with its node comes again elsewhere."""


ACTIONS: Mapping[type[Action], str] = {
    Start: "start",
    Flip: "flip",
    Leave: "leave",
    Drain: "drain",
    Stop: "stop",
    Pause: "pause",
    Resume: "resume",
}
"""Their words."""


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
    """One action. `seconds`: None while it is under way. `done`: it came to what it was for."""

    action: Action
    began: float
    seconds: float | None = None
    note: str = ""
    done: bool = False

    def close(self, note: str = "") -> None:
        if self.seconds is None:
            self.seconds, self.note, self.done = time.monotonic() - self.began, note or self.note, not note


@dataclass
class Change:
    """From one wanted layout to another.

    Attributes:
        what: the command's word. before, layout: from which to which.
        pause_s: how long new requests may wait in it; 0 where they may not.
        started: ids, and when. failed: those that came to nothing, and why.
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
    started: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def begin(self, action: Action) -> Step | None:
        """A step of its own, unless the same one is under way: an action that was lost is asked for again."""
        if any(step.action == action and step.seconds is None for step in self.steps):
            return None
        self.moved = time.monotonic()
        self.steps.append(step := Step(action, self.moved))
        return step

    def close(self, kind: type[Action], name: str = "", note: str = "") -> None:
        """The step of this kind on this instance has ended."""
        for step in self.steps:
            if isinstance(step.action, kind) and step.seconds is None and _target(step.action) == name:
                step.close(note)
                self.moved = time.monotonic()

    def follow(self, there: Mapping[str, Observed], flipped: Container[str]) -> None:
        """Close the steps that have come to something.

        Args:
            there: instances as they are, by id. flipped: ids whose flip has yet to be seen.
        """
        for name in self.started:
            one = there.get(name)
            if one is not None and one.phase is Phase.UP:
                self.close(Start, name)
            if one is not None and given_up(one) and name not in self.failed:
                self.failed[name] = one.reason
                self.close(Start, name, one.reason)
        for step in self.steps:
            if isinstance(step.action, Stop | Drain) and step.action.id not in there:
                step.close()
            if isinstance(step.action, Flip) and step.action.id not in flipped:
                step.close()

    @property
    def running(self) -> list[str]:
        """Words of the actions under way."""
        return [ACTIONS[type(step.action)] for step in self.steps if step.seconds is None]

    def outcomes(self) -> list[tuple[str, str]]:
        """Word and outcome of each action that has ended: `done` or `failed`."""
        ended = (step for step in self.steps if step.seconds is not None)
        return [(ACTIONS[type(step.action)], "done" if step.done else "failed") for step in ended]

    @property
    def idle_s(self) -> float:
        """Since something has moved."""
        return time.monotonic() - self.moved

    def revert(self, why: str) -> None:
        """Its way goes back now, for this reason."""
        self.state, self.reason, self.moved = State.REVERTING, why, time.monotonic()
        self.started.clear()
        self.failed.clear()

    def end(self, state: State) -> None:
        self.state, self.seconds = state, time.monotonic() - self.began
        for step in self.steps:
            step.close("" if state is State.DONE else "not finished")


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

    def close(self, kind: type[Action], name: str = "") -> None:
        """As of the change under way, if there is one."""
        if self.present is not None:
            self.present.close(kind, name)

    def end(self, state: State) -> None:
        change = self.present
        assert change is not None, "nothing is under way"
        change.end(state)
        self.ended[change.what, state.value] += 1
        self._actions.update(change.outcomes())
        self.past.append(change)
        self.present = None
        self._over.set()

    def actions(self) -> Counter[tuple[str, str]]:
        """How many have ended in this life, by word and outcome."""
        return self._actions + Counter(self.present.outcomes() if self.present is not None else ())

    async def over(self) -> None:
        """Wait until none is under way; whoever waits sets the deadline."""
        while self.present is not None:
            await self._over.wait()


def _target(action: Action) -> str:
    return "" if isinstance(action, Pause | Resume) else action.id


def change_json(change: Change) -> dict[str, Any]:
    """All of it for programs."""
    seconds = change.seconds if change.seconds is not None else time.monotonic() - change.began
    return {
        "number": change.number,
        "what": change.what,
        "from": change.before,
        "to": change.layout,
        "state": change.state.value,
        "over": change.state.over,
        "reason": change.reason,
        "seconds": round(seconds, 3),
        "paused_s": round(change.paused_s, 3),
        "cut_requests": change.cut,
        "steps": [
            {
                **action_json(step.action),
                "began_s": round(step.began - change.began, 3),
                "seconds": round(step.seconds, 3) if step.seconds is not None else None,
                "note": step.note,
            }
            for step in change.steps
        ],
    }


def action_json(action: Action) -> dict[str, object]:
    """An action in words for programs."""
    told: dict[str, object] = {"action": ACTIONS[type(action)]}
    if not isinstance(action, Pause | Resume):
        told["instance"] = action.id
    if isinstance(action, Start):
        spec = action.spec
        told |= {"role": spec.role.value, "node": spec.node, "devices": list(spec.devices)}
    if isinstance(action, Flip):
        told["role"] = action.role.value
    return told


@dataclass(frozen=True)
class Answer:
    """What will be done.

    Attributes:
        change: None where it was only asked for.
        notes: what whoever asked should know.
        expected_s, expected_pause_s: by experience; None without any.
    """

    plan: Plan
    layout: str
    change: Change | None = None
    notes: tuple[str, ...] = ()
    expected_s: float | None = None
    expected_pause_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "layout": self.layout,
            "plan": {
                "waves": [[action_json(action) for action in wave] for wave in self.plan.waves],
                "pauses": self.plan.pauses,
                "expected_s": self.expected_s,
                "expected_pause_s": self.expected_pause_s,
            },
            "notes": list(self.notes),
            "change": change_json(self.change) if self.change is not None else None,
        }
