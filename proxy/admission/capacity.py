"""How much may be with the stages at once: from what they report, or from the settings where they do not.

Enough that no stage ever runs dry while somebody waits, and no more: whoever waits here can still be overtaken, refused
or cancelled at no cost, whoever waits in a stage cannot. `capacity` is pure; `CapacityTracker` asks it with what the
status table knows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

from epd_serve.roles import Role
from epd_serve.wire import StageReport
from proxy.admission.queue import Capacity
from proxy.config.limits import AdmissionLimits
from proxy.config.settings import ProxySettings
from proxy.registry.instance_state import REPORT_TRUST_S
from proxy.registry.table import InstanceTable

AHEAD = 1.25
"""Sequences with an instance per sequence that it can run: those being prefilled are about to be decoded."""

KV_FULL = 0.95
"""Beyond this an instance preempts, or holds requests back, rather than runs more."""

TRUST_S = 0.05
"""Stages report no more often, and with many of them working it out takes as long as routing a request."""

SAYS_NOTHING = StageReport("", "", 0)


def capacity(
    stages: Iterable[tuple[Role, StageReport | None]], settings: AdmissionLimits, *, processes: int = 1
) -> Capacity:
    """Returns the capacity of all live instances together; that of one typical instance where there is none of a kind,
    since then the request has to go on to be told so.

    Args:
        stages: of each instance that gets requests its role, and its last report, if that is fresh.
        processes: proxies that share the stages; each gets an equal part.
    """
    encodes = sequences = tokens = 0.0
    for role, fresh in stages:
        report = fresh or SAYS_NOTHING
        encodes += settings.encodes_per_instance * (role is Role.E)
        if role.decodes:
            sequences += _sequences(report, settings)
        if role.prefills:  # or as many as it does within `prefill_s`, where that is more
            tokens += max(settings.prefill_tokens, report.prompt_tokens_per_s * settings.prefill_s)
    return Capacity(
        math.ceil((encodes or settings.encodes_per_instance) / processes),
        math.ceil((sequences or settings.sequences_per_instance) / processes),
        math.ceil((tokens or settings.prefill_tokens) / processes),
    )


def _sequences(report: StageReport, settings: AdmissionLimits) -> int:
    can = math.ceil(report.max_running * AHEAD) or settings.sequences_per_instance
    full = report.kv_used >= KV_FULL and report.waiting
    return max(1, min(can, report.running + report.waiting)) if full else can


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
            stages = [
                (view.instance.role, view.stage if view.stage_age_s < REPORT_TRUST_S else None)
                for view in self._table.snapshot()
                if view.up
            ]
            self._latest = capacity(stages, self._settings.admission, processes=self._settings.processes)
            self._computed_at = now
        return self._latest
