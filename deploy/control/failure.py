"""When a change has failed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from deploy.change.types import Actual
from deploy.control.changes import Change
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
