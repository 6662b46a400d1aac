"""Who has stopped to report while others still do: a stage that hangs keeps its connections, and looks alive."""

from __future__ import annotations

import time
from collections.abc import Iterable

from proxy.registry.instance_state import InstanceState

SILENCE_S = 5.0
"""Reports come twice a second. Machines that are short of cores hold them up, but not for as long as this."""


class SilenceWatch:
    """Knows when instances reported last, in one event loop. A pause in which nobody at all was heard is this end's,
    and is held against nobody.

    Args:
        limit_s: after how long without a report an instance counts as silent, if it ever reported.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._last_report_at = 0.0  # of any instance
        self._listening_since = 0.0
        self._checked_at = 0.0

    def note_report(self) -> float:
        """Some instance reports now. Returns the time."""
        now = time.monotonic()
        if now > self._last_report_at + self._limit_s / 2:
            self._listening_since = now
        self._last_report_at = now
        return now

    def silence_s(self, state: InstanceState) -> float:
        """Returns for how long it has reported nothing while others did; 0 for one that never reported."""
        if not state.last_report_at:
            return 0.0
        return max(0.0, self._last_report_at - max(state.last_report_at, self._listening_since))

    def newly_silent(self, states: Iterable[InstanceState]) -> list[InstanceState]:
        """Returns those that report their load and have been silent for too long. Call it while somebody reports; it
        looks ten times within the limit at most."""
        if self._last_report_at < self._checked_at + self._limit_s / 10:
            return []
        self._checked_at = self._last_report_at
        return [
            state
            for state in states
            if state.stage is not None and not state.silent and self.silence_s(state) > self._limit_s
        ]
