"""One incarnation of one instance as the status table keeps it, what requests hold of it, what others see of it, and
whether it has stopped to report.

How much is held is the ledger's (`proxy/registry/ledger.py`), what it amounts to `proxy/registry/load.py`'s.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import TracebackType

from epd_serve.instances import Instance
from epd_serve.wire import KvReport, StageReport, StoreReport
from proxy.registry.ledger import PER_UNIT, Ledger
from proxy.registry.ledger import Work as Work  # those who hold leases know it from here
from proxy.registry.load import Acquired

REPORT_TRUST_S = 3.0
"""Instances report every 0.5 s at least: what one that has fallen silent said of its store or load holds no more."""

KV_TRUST_S = 5.0
"""The same of KV links, which are reported every second at least."""


@dataclass(frozen=True)
class InstanceView:
    """A row of the table as others may see it.

    Attributes:
        load: pending work, in the unit of its role (`proxy/registry/load.py`).
        report: its last word on the store, if any. kv: the fresh ones of its workers that send KV, by rank.
        stage: its last word on its load, if any, and stage_age_s: how old that is.
        warming: it answers, and waits for its KV links to be used. draining: it is given nothing new.
        pending_s: for how long it will be busy, infinite while it decodes; neighbours: who computes where it does.
        given: grows by the work that it is given, in the unit of `load`, while all front doors are heard. What it
            begins with means nothing: places of the shared counters are used again.
    """

    instance: Instance
    up: bool
    reason: str
    in_flight: dict[Work, int]
    load: float
    report: StoreReport | None
    kv: tuple[KvReport, ...]
    warming: bool
    stage: StageReport | None = None
    stage_age_s: float = 0.0
    pending_s: float = 0.0
    neighbours: tuple[str, ...] = ()
    draining: bool = False
    given: float = 0.0


@dataclass(eq=False)
class InstanceState:
    """One incarnation of one instance.

    Attributes:
        up: it gets requests, unless it is silent. reason: why not.
        silent: it has reported before, and not for a while in which others have.
        draining: it is given nothing new; what it has goes on.
        suspended: requests go to others while there are others.
        healthy_since: when it answered first, None while it does not. down_since: when it was last said not to.
        warm: it has been up, so its KV links matter no more.
        kv, kv_reported_at: the last report of each worker that sends KV, and when it came; by rank.
    """

    instance: Instance
    up: bool
    reason: str = ""
    silent: bool = False
    draining: bool = False
    suspended: bool = False
    last_pick: int = 0
    report: StoreReport | None = None
    reported_at: float = 0.0
    stage: StageReport | None = None
    stage_reported_at: float = 0.0
    counted: int = 0  # weight acquired when that report was made
    acquired: Acquired = field(default_factory=Acquired)
    kv: dict[int, KvReport] = field(default_factory=dict)
    kv_reported_at: dict[int, float] = field(default_factory=dict)
    healthy_since: float | None = None
    down_since: float = field(default_factory=time.monotonic)
    warm: bool = False

    @property
    def working(self) -> bool:
        """It does what it is asked."""
        return self.up and not self.silent

    @property
    def serving(self) -> bool:
        """It is asked for more."""
        return self.working and not self.draining

    @property
    def why_not(self) -> str:
        """Why it gets no requests; "" where it gets them."""
        if not self.up:
            return self.reason
        return "silent, while others report" if self.silent else "draining" if self.draining else ""

    @property
    def last_report_at(self) -> float:
        """When it reported last, whatever of; 0 for one that never did."""
        return max(self.reported_at, self.stage_reported_at)

    @property
    def warming(self) -> bool:
        return self.healthy_since is not None and not self.up

    @property
    def full(self) -> bool:
        """Features wait for room in its store."""
        trusted = self.report is not None and time.monotonic() - self.reported_at < REPORT_TRUST_S
        return trusted and self.report is not None and self.report.waiting_puts > 0

    @property
    def pending(self) -> StageReport | None:
        """Its last word on its load, while it can be trusted."""
        return self.stage if time.monotonic() - self.stage_reported_at < REPORT_TRUST_S else None

    def view(
        self, in_flight: dict[Work, int], load: float, pending_s: float, neighbours: tuple[str, ...], given: float
    ) -> InstanceView:
        now = time.monotonic()
        kv = tuple(report for rank, report in sorted(self.kv.items()) if self.kv_reported_at[rank] >= now - KV_TRUST_S)
        return InstanceView(
            self.instance,
            self.serving,
            self.why_not,
            in_flight,
            load,
            self.report,
            kv,
            self.warming,
            self.stage,
            now - self.stage_reported_at if self.stage is not None else 0.0,
            pending_s,
            neighbours,
            self.draining,
            given,
        )


class Lease:
    """One unit of in-flight work on one incarnation. Released exactly once, whoever calls first.

    Args:
        weight: in the unit of the instance's role (`proxy/registry/load.py`), >= 0.
    """

    def __init__(self, ledger: Ledger, instance: Instance, work: Work, weight: float) -> None:
        assert weight >= 0, f"a lease weighs {weight}"
        self.instance = instance
        self._ledger = ledger
        self._incarnation_id = instance.incarnation_id
        self._work = work
        self._weight = round(weight * PER_UNIT)
        self._held = True
        ledger.acquire(self._incarnation_id, work, self._weight)

    def release(self) -> None:
        if self._held:
            self._held = False
            self._ledger.release(self._incarnation_id, self._work, self._weight)

    def __enter__(self) -> Instance:
        return self.instance

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


SILENCE_S = 5.0
"""Reports come twice a second. Machines that are short of cores hold them up, but not for as long as this."""


class SilenceWatch:
    """Knows when instances reported last, in one event loop: a stage that hangs keeps its connections, and looks alive.

    A pause in which nobody at all was heard is this end's, and is held against nobody.

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
