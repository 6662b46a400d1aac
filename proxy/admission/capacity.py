"""How much may be with the stages at once: from what they report, or from the settings where they do not. Pure.

Enough that no stage ever runs dry while somebody waits, and no more: whoever waits here can still be overtaken, refused
or cancelled at no cost, whoever waits in a stage cannot.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from epd_serve.roles import Role
from epd_serve.wire import StageReport
from proxy.admission.queue import Capacity
from proxy.config.settings import Admission

AHEAD = 1.25
"""Sequences with an instance per sequence that it can run: those being prefilled are about to be decoded."""

KV_FULL = 0.95
"""Beyond this an instance preempts, or holds requests back, rather than runs more."""


@dataclass(frozen=True)
class LiveStage:
    """An instance that gets requests, and its last report, if that is fresh."""

    role: Role
    report: StageReport | None


def capacity(stages: Iterable[LiveStage], settings: Admission, *, processes: int = 1) -> Capacity:
    """Over all live instances; that of one typical instance where there is none of a kind, since then the request has
    to go on to be told so.

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


def _sequences(report: StageReport | None, settings: Admission) -> float:
    if report is None:
        return settings.sequences_per_instance
    can = math.ceil(report.max_running * AHEAD) if report.max_running else settings.sequences_per_instance
    if report.kv_used >= KV_FULL and report.waiting:
        return max(1, min(can, report.running + report.waiting))
    return can


def _prefill_tokens(report: StageReport | None, settings: Admission) -> float:
    """The settings', or as many as it does within `prefill_s`, where that is more."""
    rate = report.prompt_tokens_per_s if report is not None else 0.0
    return max(settings.prefill_tokens, rate * settings.prefill_s)
