"""When a change has failed, and how long a layout that cannot be reached is left alone before it is tried again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from deploy.change.match import given_up
from deploy.change.types import Actual
from deploy.control.overlay import Overlay
from deploy.control.progress import Change
from deploy.runtime.protocol import Phase
from epd_serve.errors import ConfigError, EpdError, StageError


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


def why_failed(change: Change, actual: Actual, overlay: Overlay, deadlines: Deadlines) -> str:
    """Why it will not come to its end, or "". Those whose first start has failed are noted in `change.failed`."""
    now, up = time.monotonic(), {one.order.id for one in actual.instances if one.phase is Phase.UP}
    first = change.what == "start"
    if first:
        change.failed |= {one.order.id: one.reason for one in actual.instances if given_up(one)}
    if len(change.failed) >= (1 if first else 2):
        name, why = next(reversed(change.failed.items()))
        return f"{name} did not start: {why}"
    if first:  # each start has its deadline in the agent, from its turn on; there may be many turns
        return ""
    late = [name for name, began in change.started.items() if now > began + deadlines.start_s]
    if late := [name for name in late if name not in up and any(one.order.id == name for one in actual.instances)]:
        return f"{late[0]} is not up after {deadlines.start_s:g} s (--startup-timeout-s)"
    if now > change.moved + deadlines.start_s + deadlines.drain_s:
        return f"nothing has moved for {now - change.moved:.0f} s"
    overdue = [name for name, task in overlay.leaving.items() if not task.done()]
    if overdue and now > change.moved + deadlines.drain_s:
        return f"{overdue[0]} has prefills that do not end within {deadlines.drain_s:g} s (--drain-s)"
    return ""


def start_failed(change: Change, why: str) -> EpdError:
    """What ends a launch whose first start has failed."""
    failed = next(reversed(change.failed), "")
    return StageError(f"stage {why}", stage=failed) if failed else ConfigError(f"{change.layout}: {why}")


class Trouble:
    """Why what is wanted is not there and nothing is under way, and when it is tried again.

    Attributes:
        reason: "" while there is none.
    """

    def __init__(self, deadlines: Deadlines, say: Callable[[str], None]) -> None:
        self.reason = ""
        self._deadlines = deadlines
        self._say = say
        self._again_at, self._again_s = 0.0, deadlines.again_s

    @property
    def wait_s(self) -> float:
        """Until the next try."""
        return self._again_at - time.monotonic() if self.reason else 0.0

    def wait(self, layout: str, why: str) -> None:
        """This layout is not reached, and is left alone for a while: longer each time."""
        if why != self.reason:
            self._say(f"{layout} is not reached: {why}; tried again every {self._again_s:g} s")
        self.reason = why
        self._again_at = time.monotonic() + self._again_s
        self._again_s = min(self._deadlines.again_max_s, 2 * self._again_s)

    def over(self) -> None:
        self.reason = ""

    def forget(self) -> None:
        """Something else is wanted."""
        self.reason, self._again_s = "", self._deadlines.again_s
