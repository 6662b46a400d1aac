"""What may be with the stages now: `proxy/admission/capacity.py` asked with what the status table knows."""

from __future__ import annotations

import time

from epd_serve.wire import StageReport
from proxy.admission.capacity import LiveStage, capacity
from proxy.admission.queue import Capacity
from proxy.config.settings import ProxySettings
from proxy.registry.instance_state import REPORT_TRUST_S, InstanceView
from proxy.registry.table import InstanceTable

TRUST_S = 0.05
"""Stages report no more often, and with many of them working it out takes as long as routing a request."""


class CapacityTracker:
    """Worked out anew when the last answer is too old."""

    def __init__(self, table: InstanceTable, settings: ProxySettings) -> None:
        self._table = table
        self._settings = settings
        self._latest: Capacity | None = None
        self._computed_at = 0.0

    def __call__(self) -> Capacity:
        now = time.monotonic()
        if self._latest is None or now > self._computed_at + TRUST_S:
            stages = [LiveStage(view.instance.role, _fresh(view)) for view in self._table.snapshot() if view.up]
            self._latest = capacity(stages, self._settings.admission, processes=self._settings.processes)
            self._computed_at = now
        return self._latest


def _fresh(view: InstanceView) -> StageReport | None:
    return view.stage if view.stage_age_s < REPORT_TRUST_S else None
