"""One incarnation of one instance as the status table keeps it, what others see of it, and when its KV links are warm.
Pure.

Warm links are part of being ready, for a first transfer costs seconds more. Senders open and probe their links by
themselves, and report them (`epd_serve.wire.KvReport`). A pair of healthy stages is warm when all workers of the sender
have reported in this incarnation, and no link of theirs to the other one is still being opened. Links that nobody
reports are not waited for: a sender that tells no news, or a receiver that came after the sender and that it meets with
its first transfer. The status table asks this at the start of an incarnation only, and for `GRACE_S` at most.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from epd_serve.instances import Instance
from epd_serve.wire import KvLink, KvReport, StageReport, StoreReport
from proxy.registry.load import Lease as Lease  # who knows what is held of an instance knows it from here
from proxy.registry.load import Work as Work
from proxy.registry.load import reported_rate

REPORT_TRUST_S = 3.0
"""Instances report every 0.5 s at least: what one that has fallen silent said of its store or load holds no more."""

KV_TRUST_S = 5.0
"""The same of KV links, which are reported every second at least."""

GRACE_S = 15.0
"""How long a healthy instance waits at most for its KV links."""


@dataclass(frozen=True)
class InstanceView:
    """A row of the table as others may see it.

    Attributes:
        up: it gets requests. reason: why not.
        load: pending work, in the unit of its role (`proxy/registry/load.py`).
        report: its last word on the store, if any. kv: the fresh ones of its workers that send KV, by rank.
        stage: its last word on its load, if any, and stage_age_s: how old that is.
        pending_s: for how long it will be busy, infinite while it decodes; neighbours: who computes where it does.
        draining: it is given nothing new.
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
    stage: StageReport | None
    stage_age_s: float
    pending_s: float
    neighbours: tuple[str, ...]
    draining: bool
    given: float


@dataclass(eq=False)
class InstanceRow:
    """One incarnation of one instance.

    Attributes:
        healthy_since: when it answered first, None while it does not. down_since: when it was last said not to.
        warm: it has been up, so its KV links matter no more. reason: why it is not up.
        silent: it has reported before, and not for a while in which others have.
        draining: it is given nothing new; what it has goes on.
        suspended: requests go to others while there are others.
        store, stage: its last reports, and when they came.
        given: weight acquired in total when `stage` came; counted: as much of it as may be in that report.
        kv, kv_at: the last report of each worker that sends KV, and when it came; by rank.
    """

    instance: Instance
    healthy_since: float | None
    warm: bool
    reason: str
    down_since: float = field(default_factory=time.monotonic)
    silent: bool = False
    draining: bool = False
    suspended: bool = False
    last_pick: int = 0
    store: StoreReport | None = None
    store_at: float = 0.0
    stage: StageReport | None = None
    stage_at: float = 0.0
    given: int = 0
    counted: int = 0
    kv: dict[int, KvReport] = field(default_factory=dict)
    kv_at: dict[int, float] = field(default_factory=dict)

    @property
    def up(self) -> bool:
        """It gets requests, unless it is silent or drains."""
        return self.warm and self.healthy_since is not None

    @property
    def serving(self) -> bool:
        return self.up and not self.silent and not self.draining

    @property
    def why_not(self) -> str:
        """Why it gets no requests; "" where it gets them."""
        if not self.up:
            return self.reason
        return "silent, while others report" if self.silent else "draining" if self.draining else ""

    @property
    def full(self) -> bool:
        """Features wait for room in its store."""
        return (
            self.store is not None and self.store.waiting_puts > 0 and time.monotonic() - self.store_at < REPORT_TRUST_S
        )

    @property
    def fresh(self) -> StageReport | None:
        """Its last word on its load, while it can be trusted."""
        return self.stage if time.monotonic() - self.stage_at < REPORT_TRUST_S else None

    @property
    def rate(self) -> float:
        return reported_rate(self.instance.role, self.stage) if self.stage is not None else 0.0


def leads_to(link: KvLink, receiver: Instance) -> bool:
    """A link is named by its address until the other end has answered."""
    return link.peer == receiver.id or link.peer in receiver.kv_workers


def why_cold(sender: Instance, reports: Mapping[int, KvReport], receiver: Instance) -> str:
    """The link that is not up and why, or "" where there is nothing to wait for.

    Args:
        reports: the last ones of this incarnation of the sender, by rank of its workers.
    """
    if not (sender.role.sends_kv and receiver.role.takes_kv):
        return ""
    for rank in range(len(sender.kv_news)):
        worker = f"{sender.id} rank {rank}"
        if rank not in reports:
            return f"{worker} has not reported its KV links"
        for link in reports[rank].links:
            if link.state != "up" and leads_to(link, receiver):
                reason = f" ({link.reason})" if link.reason else ""
                return f"KV link from {worker} to {receiver.id} rank {link.rank} is {link.state}{reason}"
    return ""
