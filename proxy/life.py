"""One life of one instance as the status table keeps it, what requests hold of it, and what others see of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType

from epd_serve.instances import Instance
from epd_serve.wire import KvReport, StageReport, StoreReport

REPORT_TRUST_S = 3.0
"""Instances report every 0.5 s at least: one that has fallen silent says nothing about its store any more."""

KV_TRUST_S = 5.0
"""The same of KV links, which are reported every second at least."""


class Work(StrEnum):
    """Kinds of work that a request asks of an instance."""

    ENCODE = "encode"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True)
class InstanceView:
    """A row of the table as others may see it.

    Attributes:
        load: in requests (P, D) or pixels (E).
        report: its last one, if any. kv: the fresh ones of its workers that send KV, by rank.
        warming: it answers, and waits for its KV links to be used.
    """

    instance: Instance
    up: bool
    reason: str
    in_flight: dict[Work, int]
    load: float
    report: StoreReport | None
    kv: tuple[KvReport, ...]
    warming: bool


@dataclass(eq=False)
class Life:
    """One incarnation of one instance.

    Attributes:
        up: it gets requests. reason: why not.
        healthy_since: when it answered first, None while it does not.
        warm: it has been up, so its KV links matter no more.
        kv, kv_heard: the last report of each worker that sends KV, and when it came; by rank.
    """

    instance: Instance
    up: bool
    reason: str = ""
    in_flight: dict[Work, int] = field(default_factory=lambda: dict.fromkeys(Work, 0))
    load: float = 0.0
    last_pick: int = 0
    report: StoreReport | None = None
    reported_at: float = 0.0
    stage: StageReport | None = None
    kv: dict[int, KvReport] = field(default_factory=dict)
    kv_heard: dict[int, float] = field(default_factory=dict)
    healthy_since: float | None = None
    warm: bool = False

    @property
    def warming(self) -> bool:
        return self.healthy_since is not None and not self.up

    @property
    def full(self) -> bool:
        """Features wait for room in its store."""
        trusted = self.report is not None and time.monotonic() - self.reported_at < REPORT_TRUST_S
        return trusted and self.report is not None and self.report.waiting_puts > 0

    def view(self) -> InstanceView:
        since = time.monotonic() - KV_TRUST_S
        kv = tuple(report for rank, report in sorted(self.kv.items()) if self.kv_heard[rank] >= since)
        return InstanceView(
            self.instance, self.up, self.reason, dict(self.in_flight), self.load, self.report, kv, self.warming
        )


class Lease:
    """One unit of in-flight work on one incarnation. Released exactly once, whoever calls first."""

    def __init__(self, life: Life, work: Work, weight: float) -> None:
        self.instance = life.instance
        self._life = life
        self._work = work
        self._weight = weight
        self._held = True
        life.in_flight[work] += 1
        life.load += weight

    def release(self) -> None:
        if self._held:
            self._held = False
            self._life.in_flight[self._work] -= 1
            self._life.load -= self._weight

    def __enter__(self) -> Instance:
        return self.instance

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
