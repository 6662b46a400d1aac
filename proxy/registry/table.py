"""The status table: which instances exist, which are up, and how loaded each is.

Lives in the proxy's event loop and is called only from there (no locks). The launcher calls `apply`, `mark_up`
and `mark_down` directly; the instances' own reports come in through `report`, `report_kv` and `report_stage`; requests
hold a `Lease` while a stage works for them. What an instance's load is follows from both (`proxy/registry/load.py`).
Choosing among instances is `proxy/routing/policy.py`'s business.

A life that answers is healthy. It is up, and gets requests, once its KV links to and from the others that are healthy
are warm (`proxy/registry/warm_links.py`), or a grace has passed; from then on links do not matter: retries are for
those. One that stops to report, while others do, leaves until its next report: it may be stopped and still accept
connections.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence

from epd_serve.instances import Instance
from epd_serve.roles import Role
from epd_serve.wire import KvReport, StageReport, StoreReport
from proxy.registry.instance_state import InstanceView, Lease, Life, Work
from proxy.registry.ledger import Ledger, LifeId, OwnLedger
from proxy.registry.load import load, reported_rate
from proxy.registry.warm_links import GRACE_S, why_cold
from proxy.routing.policy import Candidate

logger = logging.getLogger(__name__)

SILENCE_S = 5.0
"""Reports come twice a second. Machines that are short of cores hold them up, but not for as long as this."""


class InstanceTable:
    """Instances by id, in order of first appearance.

    Args:
        link_grace_s: how long a healthy instance waits at most for its KV links.
        ledger: counts the leases; shared where several processes route over the same instances.
        silence_s: after how long without a word an instance leaves, if it ever reported and others still do.
    """

    def __init__(
        self, *, link_grace_s: float = GRACE_S, ledger: Ledger | None = None, silence_s: float = SILENCE_S
    ) -> None:
        self._link_grace_s = link_grace_s
        self._ledger = ledger if ledger is not None else OwnLedger()
        self._silence_s = silence_s
        self._looked_at = 0.0  # when silences were looked for last
        self._listens_since = 0.0
        self._lives: dict[str, Life] = {}
        self._by_role: dict[Role, list[Life]] | None = None
        self._retired: list[LifeId] = []
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
            self._retired = [gone for gone in self._retired if gone != (instance.id, instance.incarnation)]
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
        life.report, life.reported_at = report, self._hear()
        self._end_silence(life)
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
        """Take in how busy an instance is. Ignored as in `report`, and when a later one is known."""
        life = self._lives.get(report.instance)
        if life is None or life.instance.incarnation != report.incarnation:
            return
        if life.stage is not None and report.seq <= life.stage.seq:
            return
        self._hear()
        self._note(life)
        life.counted = life.acquired.before(self._heard_at)
        life.stage, life.stage_heard = report, self._heard_at
        self._end_silence(life)
        self._find_silent()

    def suspend(self, instance_id: str, incarnation: str, suspended: bool) -> None:
        """Have this life picked only where nothing else is there, or again like any other. Past lives are ignored.
        Wakes nobody: who waits for a change would only run to an instance that has just one probe to give."""
        life = self._lives.get(instance_id)
        if life is not None and life.instance.incarnation == incarnation:
            life.suspended = suspended

    # What requests ask.

    def acquire(self, instance_id: str, work: Work, weight: float = 1.0) -> Lease:
        """Count one piece of work on the current incarnation of `instance_id`; `weight` in the unit of its role."""
        life = self._lives[instance_id]
        self._picks += 1
        life.last_pick = self._picks
        lease = Lease(self._ledger, life.instance, work, weight)
        self._note(life)
        return lease

    def note_acquired(self) -> None:
        """Look at what has been acquired. Call it every few milliseconds where other processes share the ledger: what
        they acquire passes through no other method here."""
        for life in self._lives.values():
            self._note(life)

    def live(self, role: Role) -> tuple[Candidate, ...]:
        """Instances of `role` that are up, as the policies see them."""
        return tuple(
            [
                Candidate(
                    life.instance.id,
                    life.instance.incarnation,
                    self._load(life),
                    life.last_pick,
                    life.full,
                    reported_rate(role, life.stage) if life.stage is not None else 0.0,
                    life.suspended,
                )
                for life in self._serving().get(role, ())
            ]
        )

    def silence_s(self, instance_id: str, incarnation: str) -> float:
        """For how long this life has reported nothing while others did; 0 for one that never reports. A stage that
        hangs looks alive for longer than its reports, which come twice a second, stay away."""
        life = self._lives.get(instance_id)
        if life is None or life.instance.incarnation != incarnation or not life.heard:
            return 0.0
        return max(0.0, self._heard_at - max(life.heard, self._listens_since))

    def lives(self, instance_id: str, incarnation: str) -> bool:
        """Whether this life is still there, as far as the launcher has said."""
        life = self._lives.get(instance_id)
        return life is not None and life.instance.incarnation == incarnation and life.healthy_since is not None

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
        lives = self._lives.values()
        links = (address for life in lives for address in life.instance.kv_news)
        loads = (life.instance.load_news for life in lives if life.instance.load_news)
        return self.event_addresses() | frozenset(links) | frozenset(loads)

    def live_roles(self) -> frozenset[Role]:
        return frozenset(self._serving())

    def _serving(self) -> Mapping[Role, Sequence[Life]]:
        """Lives that get requests, by role, in order. The same object until somebody comes or goes."""
        if self._by_role is None:
            self._by_role = {}
            for life in self._lives.values():
                if life.serving:
                    self._by_role.setdefault(life.instance.role, []).append(life)
        return self._by_role

    def missing(self, wanted: Iterable[Role] = ()) -> tuple[Role, ...]:
        """Roles of the layout (or, without one, of the table) that no live instance has."""
        live = self.live_roles()
        return tuple(sorted(set(wanted or self.roles()) - live))

    def snapshot(self) -> tuple[InstanceView, ...]:
        return tuple(
            life.view(
                {work: tally.held for work, tally in self._ledger.tallies(life.id).items()},
                self._load(life),
            )
            for life in self._lives.values()
        )

    def total_in_flight(self) -> int:
        """Leases not yet released, on present and past incarnations."""
        self._forget_idle()
        return sum(self._held(life) for life in (*(life.id for life in self._lives.values()), *self._retired))

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
        self._by_role = None
        self._retired.append(life.id)
        self._forget_idle()

    def _forget_idle(self) -> None:
        for life in [one for one in self._retired if not self._held(one)]:
            self._retired.remove(life)
            self._ledger.forget(life)

    def _held(self, life: LifeId) -> int:
        return sum(tally.held for tally in self._ledger.tallies(life).values())

    def _load(self, life: Life) -> float:
        return load(life.instance.role, self._ledger.tallies(life.id).values(), life.pending, life.counted)

    def _note(self, life: Life) -> None:
        tallies = self._ledger.tallies(life.id).values()
        life.acquired.note(time.monotonic(), sum(tally.acquired_weight for tally in tallies))

    def _hear(self) -> float:
        """Somebody reports, now."""
        now = time.monotonic()
        if now > self._heard_at + self._silence_s / 2:
            self._listens_since = now  # nobody was heard: what is silent is this end, or was
        self._heard_at = now
        return now

    def _find_silent(self) -> None:
        """Called while somebody reports. An instance that never did is not known to report at all."""
        if self._heard_at < self._looked_at + self._silence_s / 10:
            return
        self._looked_at = self._heard_at
        for life in self._lives.values():
            heard = max(life.heard, self._listens_since)
            if life.stage is not None and not life.silent and self._heard_at > heard + self._silence_s:
                logger.warning("%s has stopped to report", life.instance.id)
                life.silent = True
                self._announce()

    def _end_silence(self, life: Life) -> None:
        if life.silent:
            logger.info("%s reports again", life.instance.id)
            life.silent = False
            self._announce()

    def _announce(self) -> None:
        self._by_role = None
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
