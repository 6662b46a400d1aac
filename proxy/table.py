"""The status table: which instances exist, which are up, and what the proxy has in flight on each.

Lives in the proxy's event loop and is called only from there (no locks). The launcher calls `apply`, `mark_up`
and `mark_down` directly; the instances' own reports come in through `report`; requests hold a `Lease` while a stage
works for them. Choosing among instances is
`proxy/policy.py`'s business.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType

from epd_serve.instances import Instance
from epd_serve.roles import Role
from epd_serve.wire import StoreReport
from proxy.policy import Candidate

REPORT_TRUST_S = 3.0
"""Instances report every 0.5 s at least: one that has fallen silent says nothing about its store any more."""


class Work(StrEnum):
    """Kinds of work that a request asks of an instance."""

    ENCODE = "encode"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(eq=False)
class _Life:
    """One incarnation of one instance."""

    instance: Instance
    up: bool
    reason: str = ""
    in_flight: dict[Work, int] = field(default_factory=lambda: dict.fromkeys(Work, 0))
    load: float = 0.0
    last_pick: int = 0
    report: StoreReport | None = None
    reported_at: float = 0.0

    @property
    def full(self) -> bool:
        """Features wait for room in its store."""
        trusted = self.report is not None and time.monotonic() - self.reported_at < REPORT_TRUST_S
        return trusted and self.report is not None and self.report.waiting_puts > 0


@dataclass(frozen=True)
class InstanceView:
    """A row as others may see it. `load` is in requests (P, D) or pixels (E). `report`: its last one, if any."""

    instance: Instance
    up: bool
    reason: str
    in_flight: dict[Work, int]
    load: float
    report: StoreReport | None


class Lease:
    """One unit of in-flight work on one incarnation. Released exactly once, whoever calls first."""

    def __init__(self, life: _Life, work: Work, weight: float) -> None:
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


class InstanceTable:
    """Instances by id, in order of first appearance."""

    def __init__(self) -> None:
        self._lives: dict[str, _Life] = {}
        self._retired: list[_Life] = []
        self._picks = 0
        self._waiters: set[asyncio.Future[None]] = set()
        self._heard_at = 0.0  # when anybody reported last

    # What the launcher says.

    def apply(self, instance: Instance, *, up: bool = True) -> None:
        """Make `instance` known. A new id or a new incarnation starts as `up` says, with nothing in flight;
        the same incarnation keeps its state and only takes over changed fields."""
        life = self._lives.get(instance.id)
        if life is not None and life.instance.incarnation == instance.incarnation:
            life.instance = instance
        else:
            if life is not None:
                self._retire(life)
            self._lives[instance.id] = _Life(instance, up, "" if up else "starting")
        self._announce()

    def mark_up(self, instance_id: str) -> None:
        """The instance answers. Unknown ids raise KeyError: announce it with `apply` first."""
        self._set(self._lives[instance_id], True, "")

    def mark_down(self, instance_id: str, reason: str, *, incarnation: str | None = None) -> None:
        """Send it nothing more. With `incarnation`, a late word about a previous life is ignored."""
        life = self._lives[instance_id]
        if incarnation is None or incarnation == life.instance.incarnation:
            self._set(life, False, reason)

    def remove(self, instance_id: str) -> None:
        """Forget an instance (re-layout)."""
        self._retire(self._lives.pop(instance_id))
        self._announce()

    # What the instances say.

    def report(self, report: StoreReport) -> None:
        """Take in what an instance sees of the MM Store. Words of unknown instances and past lives are ignored."""
        life = self._lives.get(report.instance)
        if life is None or life.instance.incarnation != report.incarnation:
            return
        was_full = life.full
        self._heard_at = time.monotonic()
        life.report, life.reported_at = report, self._heard_at
        if was_full and not life.full:
            self._announce()

    # What requests ask.

    def acquire(self, instance_id: str, work: Work, weight: float = 1.0) -> Lease:
        """Count one piece of work on the current incarnation of `instance_id`."""
        life = self._lives[instance_id]
        self._picks += 1
        life.last_pick = self._picks
        return Lease(life, work, weight)

    def live(self, role: Role) -> tuple[Candidate, ...]:
        """Instances of `role` that are up, as the policies see them."""
        return tuple(
            Candidate(instance_id, life.instance.incarnation, life.load, life.last_pick, life.full)
            for instance_id, life in self._lives.items()
            if life.up and life.instance.role is role
        )

    def silence_s(self, instance_id: str, incarnation: str) -> float:
        """For how long this life has reported nothing while others did; 0 for one that never reports. A stage that
        hangs looks alive for longer than its reports, which come twice a second, stay away."""
        life = self._lives.get(instance_id)
        if life is None or life.instance.incarnation != incarnation or life.report is None:
            return 0.0
        return self._heard_at - life.reported_at

    def instance(self, instance_id: str) -> Instance:
        return self._lives[instance_id].instance

    def roles(self) -> frozenset[Role]:
        """Roles that some instance has, up or not."""
        return frozenset(life.instance.role for life in self._lives.values())

    def event_addresses(self) -> frozenset[str]:
        """Where instances announce, up or not."""
        return frozenset(life.instance.events for life in self._lives.values() if life.instance.events)

    def live_roles(self) -> frozenset[Role]:
        return frozenset(life.instance.role for life in self._lives.values() if life.up)

    def missing(self, wanted: Iterable[Role] = ()) -> tuple[Role, ...]:
        """Roles of the layout (or, without one, of the table) that no live instance has."""
        live = self.live_roles()
        return tuple(sorted(set(wanted or self.roles()) - live))

    def snapshot(self) -> tuple[InstanceView, ...]:
        return tuple(
            InstanceView(life.instance, life.up, life.reason, dict(life.in_flight), life.load, life.report)
            for life in self._lives.values()
        )

    def total_in_flight(self) -> int:
        """Leases not yet released, on present and past incarnations."""
        self._retired = [life for life in self._retired if any(life.in_flight.values())]
        return sum(sum(life.in_flight.values()) for life in (*self._lives.values(), *self._retired))

    async def changed(self, timeout_s: float) -> bool:
        """Wait until an instance comes, goes, goes up or down, or has room in its store again; False when `timeout_s`
        passed first."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            async with asyncio.timeout(max(timeout_s, 0)):
                await waiter
        except TimeoutError:
            return False
        finally:
            self._waiters.discard(waiter)
        return True

    def _set(self, life: _Life, up: bool, reason: str) -> None:
        changed = life.up is not up
        life.up, life.reason = up, reason
        if changed:  # a poller repeats itself every second; those who wait want news
            self._announce()

    def _retire(self, life: _Life) -> None:
        life.up = False
        self._retired = [old for old in (*self._retired, life) if any(old.in_flight.values())]

    def _announce(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
