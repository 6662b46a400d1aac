"""The status table: which instances exist, which are up, and what the proxy has in flight on each.

Lives in the proxy's event loop and is called only from there (no locks). The launcher calls `apply`, `mark_up`
and `mark_down` directly; the instances' own reports come in through `report` and `report_kv`; requests hold a `Lease`
while a stage works for them. Choosing among instances is `proxy/policy.py`'s business.

A life that answers is healthy. It is up, and gets requests, once its KV links to and from the others that are healthy
are warm (`proxy/warm_links.py`), or a grace has passed; from then on links do not matter: retries are for those.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable

from epd_serve.instances import Instance
from epd_serve.roles import Role
from epd_serve.wire import KvReport, StageReport, StoreReport
from proxy.life import InstanceView, Lease, Life, Work
from proxy.policy import Candidate
from proxy.warm_links import GRACE_S, why_cold

logger = logging.getLogger(__name__)


class InstanceTable:
    """Instances by id, in order of first appearance.

    Args:
        link_grace_s: how long a healthy instance waits at most for its KV links.
    """

    def __init__(self, *, link_grace_s: float = GRACE_S) -> None:
        self._link_grace_s = link_grace_s
        self._lives: dict[str, Life] = {}
        self._retired: list[Life] = []
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
            since = time.monotonic() if up else None
            self._lives[instance.id] = Life(instance, up, "" if up else "starting", healthy_since=since, warm=up)
            self._settle()
        self._announce()

    def mark_up(self, instance_id: str) -> None:
        """The instance answers. Unknown ids raise KeyError: announce it with `apply` first."""
        life = self._lives[instance_id]
        begins = life.healthy_since is None
        if begins:
            life.healthy_since = time.monotonic()
        self._settle()
        if begins and life.warming:
            asyncio.get_running_loop().call_later(self._link_grace_s, self._settle)

    def mark_down(self, instance_id: str, reason: str, *, incarnation: str | None = None) -> None:
        """Send it nothing more. With `incarnation`, a late word about a previous life is ignored."""
        life = self._lives[instance_id]
        if incarnation is None or incarnation == life.instance.incarnation:
            life.healthy_since = None
            self._set(life, False, reason)
            self._settle()

    def remove(self, instance_id: str) -> None:
        """Forget an instance (re-layout)."""
        self._retire(self._lives.pop(instance_id))
        self._settle()
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

    def report_kv(self, report: KvReport) -> None:
        """Take in how the KV links of one worker are. Ignored as in `report`, and of ranks that are not there."""
        life = self._lives.get(report.instance)
        if life is None or life.instance.incarnation != report.incarnation:
            return
        if 0 <= report.rank < len(life.instance.kv_news):
            life.kv[report.rank] = report
            life.kv_heard[report.rank] = time.monotonic()
            self._settle()

    def report_stage(self, report: StageReport) -> None:
        """Take in how busy an instance is. Ignored as in `report`."""
        life = self._lives.get(report.instance)
        if life is not None and life.instance.incarnation == report.incarnation:
            life.stage = report

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
        """Where instances announce what concerns features, up or not."""
        return frozenset(life.instance.events for life in self._lives.values() if life.instance.events)

    def news_addresses(self) -> frozenset[str]:
        """Where anything is announced."""
        links = (address for life in self._lives.values() for address in life.instance.kv_news)
        return self.event_addresses() | frozenset(links)

    def live_roles(self) -> frozenset[Role]:
        return frozenset(life.instance.role for life in self._lives.values() if life.up)

    def missing(self, wanted: Iterable[Role] = ()) -> tuple[Role, ...]:
        """Roles of the layout (or, without one, of the table) that no live instance has."""
        live = self.live_roles()
        return tuple(sorted(set(wanted or self.roles()) - live))

    def snapshot(self) -> tuple[InstanceView, ...]:
        return tuple(life.view() for life in self._lives.values())

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

    def _settle(self) -> None:
        """Take into service who is healthy and has waited for its links long enough."""
        for life in self._lives.values():
            if not life.warming or life.healthy_since is None:
                continue
            cold = "" if life.warm else self._why_cold(life)
            if cold and time.monotonic() < life.healthy_since + self._link_grace_s:
                life.reason = cold
                continue
            if cold:
                logger.warning("%s serves although %s", life.instance.id, cold)
            life.warm = True
            self._set(life, True, "")

    def _why_cold(self, life: Life) -> str:
        """Of the links between this one and the others that are healthy, the first that is not warm."""
        for other in self._lives.values():
            if other is not life and other.healthy_since is not None:
                for sender, receiver in ((life, other), (other, life)):
                    if cold := why_cold(sender.instance, sender.kv, receiver.instance):
                        return cold
        return ""

    def _set(self, life: Life, up: bool, reason: str) -> None:
        changed = life.up is not up
        life.up, life.reason = up, reason
        if changed:  # a poller repeats itself every second; those who wait want news
            self._announce()

    def _retire(self, life: Life) -> None:
        life.up = False
        self._retired = [old for old in (*self._retired, life) if any(old.in_flight.values())]

    def _announce(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
