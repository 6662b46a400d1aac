"""How much may be with the stages at once: from what they report, or from the settings where they do not.

Enough that no stage ever runs dry while somebody waits, and no more: whoever waits here can still be overtaken, refused
or cancelled at no cost, whoever waits in a stage cannot. `capacity` is pure; `CapacityTracker` asks it with what the
status table knows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

from epd_serve.roles import Role
from epd_serve.wire import StageReport
from proxy.admission.ticket import Capacity
from proxy.config.limits import AdmissionLimits
from proxy.config.settings import ProxySettings
from proxy.registry.instance_state import REPORT_TRUST_S, InstanceView
from proxy.registry.table import InstanceTable

AHEAD = 1.25
"""Sequences with an instance per sequence that it can run: those being prefilled are about to be decoded."""

KV_FULL = 0.95
"""Beyond this an instance preempts, or holds requests back, rather than runs more."""

TRUST_S = 0.05
"""Stages report no more often, and with many of them working it out takes as long as routing a request."""


@dataclass(frozen=True)
class LiveStage:
    """An instance that gets requests, and its last report, if that is fresh."""

    role: Role
    report: StageReport | None


def capacity(stages: Iterable[LiveStage], settings: AdmissionLimits, *, processes: int = 1) -> Capacity:
    """Returns the capacity of all live instances together; that of one typical instance where there is none of a kind,
    since then the request has to go on to be told so.

    Args:
        processes: proxies that share the stages; each gets an equal part.
    """
    stages = tuple(stages)
    encodes = settings.encodes_per_instance * sum(stage.role is Role.E for stage in stages)
    sequences = sum(_sequences(stage.report, settings) for stage in stages if stage.role.decodes)
    tokens = sum(_prefill_tokens(stage.report, settings) for stage in stages if stage.role.prefills)
    return Capacity(
        math.ceil((encodes or settings.encodes_per_instance) / processes),
        math.ceil((sequences or settings.sequences_per_instance) / processes),
        math.ceil((tokens or settings.prefill_tokens) / processes),
    )


def _sequences(report: StageReport | None, settings: AdmissionLimits) -> float:
    if report is None:
        return settings.sequences_per_instance
    can = math.ceil(report.max_running * AHEAD) if report.max_running else settings.sequences_per_instance
    if report.kv_used >= KV_FULL and report.waiting:
        return max(1, min(can, report.running + report.waiting))
    return can


def _prefill_tokens(report: StageReport | None, settings: AdmissionLimits) -> float:
    """The settings', or as many as it does within `prefill_s`, where that is more."""
    rate = report.prompt_tokens_per_s if report is not None else 0.0
    return max(settings.prefill_tokens, rate * settings.prefill_s)


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
