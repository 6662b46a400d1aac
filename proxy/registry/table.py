"""The status table: which instances exist, which are up, and how loaded each is.

Lives in the proxy's event loop and is called only from there (no locks). The launcher calls `apply`, `mark_up`
and `mark_down` directly; the instances' own reports come in through `report`; requests hold a `Lease` while a stage
works for them. What an instance's load is follows from both (`proxy/registry/instance_state.py`). Choosing among
instances is `proxy/routing/policy.py`'s business.

An instance that answers is healthy. It is up, and gets requests, once its KV links to and from the others that are
healthy are warm (`why_cold`), or a grace has passed; from then on links do not matter: retries are
for those. One that stops to report, while others do, leaves until its next report: it may be stopped and still accept
connections. A pause in which nobody at all was heard is this end's, and is held against nobody.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from epd_serve.instances import IncarnationId, Instance
from epd_serve.roles import Role
from epd_serve.wire import Announcement, CacheReport, KvReport, StageReport, StoreReport
from proxy.registry.instance_state import (
    GRACE_S,
    KV_TRUST_S,
    PER_UNIT,
    REPORT_EVERY_S,
    InstanceRow,
    InstanceView,
    Lease,
    Ledger,
    Work,
    load,
    pending_s,
    reported_pending,
    whole,
    why_cold,
)
from proxy.registry.prefix_index import PrefixIndex
from proxy.routing.credits import Credit, kv_room, seats
from proxy.routing.policy import Candidate, usual_rate

logger = logging.getLogger(__name__)

SILENCE_S = 5.0
"""Reports come twice a second. Machines that are short of cores hold them up, but not for as long as this."""


class Pause:
    """A pause: new requests wait, for the deployment makes room for a change; and the clock of those who wait.

    That clock stands still meanwhile, so that nobody's wait comes to its end because of a pause, and nobody takes a
    queue that may not move for a slow one. It goes on by itself when the time of the pause is over, whoever began it.

    Args:
        clock: seconds that only ever grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until = clock()
        self._lag_s = 0.0  # of the clock of those who wait behind the other one, once this pause is over

    def begin(self, duration_s: float) -> None:
        """Pause for so long from now, whatever was said before; 0 ends it."""
        stands = self.now()
        self._until = self._clock() + duration_s
        self._lag_s = self._until - stands

    @property
    def left_s(self) -> float:
        """For how long it goes on; 0 where there is none."""
        return max(0.0, self._until - self._clock())

    def now(self) -> float:
        """The clock of those who wait."""
        return max(self._clock(), self._until) - self._lag_s


class InstanceTable:
    """Instances by id, in order of first appearance.

    Args:
        link_grace_s: how long a healthy instance waits at most for its KV links.
        ledger: counts the leases; shared where several processes route over the same instances.
        silence_s: after how long without a word an instance leaves, if it ever reported and others still do.

    Attributes:
        pause: while it lasts, new requests wait: admission, routing and the encode step look here.
        prefixes: what the instances have cached.
        reported: called when an instance has said how busy it is.
    """

    def __init__(
        self, *, link_grace_s: float = GRACE_S, ledger: Ledger | None = None, silence_s: float = SILENCE_S
    ) -> None:
        self._link_grace_s = link_grace_s
        self._ledger = ledger if ledger is not None else Ledger()
        self._rows: dict[str, InstanceRow] = {}
        self._by_role: dict[Role, list[InstanceRow]] | None = None
        self._neighbours: dict[str, list[InstanceRow]] | None = None
        self._retired: set[IncarnationId] = set()  # of which requests may hold something yet
        self._picks = 0
        self._wanted: frozenset[Role] = frozenset()
        self._limit_s = silence_s
        self._heard_at = self._heard_since = self._looked_at = 0.0  # of reports, whoever made them
        self._news = asyncio.Event()
        self.pause = Pause()
        self.prefixes = PrefixIndex()
        self.reported: Callable[[], None] = lambda: None

    # What the launcher says.

    def apply(self, instance: Instance, *, up: bool = True) -> None:
        """Make `instance` known. A new id or a new incarnation starts as `up` says, with nothing in flight;
        the same incarnation keeps its state and only takes over changed fields."""
        row = self._rows.get(instance.id)
        self._neighbours = None
        if row is not None and row.instance.incarnation == instance.incarnation:
            row.instance = instance
        else:
            if row is not None:
                self._retire(row)
            since, reason = (time.monotonic(), "") if up else (None, "starting")
            self._rows[instance.id] = InstanceRow(instance, since, up, reason)
            self._retired.discard(instance.incarnation_id)
            self._settle()
        self._announce()

    def mark_up(self, instance_id: str) -> None:
        """The instance answers. Unknown ids raise KeyError: announce it with `apply` first."""
        row = self._rows[instance_id]
        if row.healthy_since is not None:
            return
        row.healthy_since, row.reason = time.monotonic(), ""
        if row.warm:
            self._announce()
        self._settle()
        if not row.warm:
            asyncio.get_running_loop().call_later(self._link_grace_s, self._settle)

    def mark_down(self, instance_id: str, reason: str, *, incarnation: str | None = None) -> None:
        """Send it nothing more. With `incarnation`, a late word about a previous incarnation is ignored."""
        row = self._rows[instance_id]
        if incarnation is None or incarnation == row.instance.incarnation:
            if row.up:
                self._announce()
            if row.healthy_since is not None:
                row.healthy_since, row.down_since = None, time.monotonic()
            row.reason = reason
            self._settle()

    def remove(self, instance_id: str) -> None:
        """Forget an instance (re-layout)."""
        self._neighbours = None
        self._retire(self._rows.pop(instance_id))
        self._settle()
        self._announce()

    def drain(self, instance_id: str, draining: bool = True) -> None:
        """Give it nothing new, or again something; what it has goes on. Holds for its present incarnation."""
        row = self._rows[instance_id]
        if row.draining is not draining:
            row.draining = draining
            self._announce()

    def want(self, roles: Iterable[Role]) -> None:
        """The deployment is to have these. Until somebody has said so they are those of the instances there are."""
        self._wanted = frozenset(roles)
        self._announce()

    def pause_for(self, duration_s: float) -> None:
        """Have new requests wait for so long from now; 0 lets them go."""
        self.pause.begin(duration_s)
        self._announce()

    # What the instances say.

    def report(self, report: Announcement) -> bool:
        """Take in what an instance says of itself: of the MM Store, of its load, of its KV links (by rank of the
        worker), of its prefix cache. Ignored are reports of unknown instances and past incarnations, of ranks that are
        not there, loads of which a later one is known, and what is no report.

        Returns:
            Whether it is to be asked for all that it has cached, since something that it said was not heard.
        """
        if not isinstance(report, StoreReport | StageReport | KvReport | CacheReport):
            return False
        row = self._life(report.instance, report.incarnation)
        if row is None:
            return False
        now = time.monotonic()
        match report:
            case CacheReport():
                return self.prefixes.report(report)
            case KvReport() if 0 <= report.rank < len(row.instance.kv_news):
                row.kv[report.rank], row.kv_at[report.rank] = report, now
                self._settle()
            case StageReport() if row.stage is None or report.seq > row.stage.seq:
                total = self._ledger.total(row.instance.incarnation_id)
                given = total.acquired_weight
                row.prepared(total, report, now)
                row.kv_given = self._ledger.aside(row.instance.incarnation_id, Work.KV).acquired_weight
                row.counted = row.given if now < row.stage_at + 2 * REPORT_EVERY_S else given
                row.given, row.stage, row.stage_at = given, report, now
                self._heard(row, now)
                self.reported()
            case StoreReport():
                was_full = row.full
                row.store, row.store_at = report, now
                self._heard(row, now)
                if was_full and not row.full:
                    self._announce()
        return False

    def suspend(self, instance_id: str, incarnation: str, suspended: bool) -> None:
        """Have this incarnation picked only where nothing else is there, or again like any other. Past ones are
        ignored. Wakes nobody: who waits for a change would only run to an instance that has just one probe to give."""
        row = self._life(instance_id, incarnation)
        if row is not None:
            row.suspended = suspended

    # What requests ask.

    def acquire(
        self, instance_id: str, work: Work, weight: float = 1.0, aside: Mapping[Work, float] = MappingProxyType({})
    ) -> Lease:
        """Count one piece of work on the current incarnation of `instance_id`; `weight` in the unit of its role.
        `aside`: what of it is counted aside, by kind."""
        row = self._rows[instance_id]
        self._picks += 1
        row.last_pick = self._picks
        return Lease(self._ledger, row.instance, {work: weight, **aside})

    def live(self, role: Role) -> tuple[Candidate, ...]:
        """Instances of `role` that are up, as the policies see them."""
        return tuple(
            [
                Candidate(
                    row.instance.id,
                    row.instance.incarnation,
                    self._load(row),
                    row.last_pick,
                    row.full,
                    row.rate,
                    row.suspended,
                    tuple([self._pending_s(other) for other in self._sharing(row)]),
                    0.0,
                    *self._shared(row, self._ledger.total(row.instance.incarnation_id).held),
                )
                for row in self._serving().get(role, ())
            ]
        )

    def credits(self, role: Role, unreported: int) -> Iterator[Credit]:
        """Instances of `role` that are up, as what they may be given goes by. `unreported`: requests that one may have
        that reports nothing."""
        return (self._credit(row, unreported) for row in self._serving().get(role, ()))

    def silence_s(self, instance_id: str, incarnation: str) -> float:
        """Returns for how long this incarnation has reported nothing while others did; 0 for one that never reports. A
        stage that hangs looks alive for longer than its reports, which come twice a second, stay away."""
        row = self._life(instance_id, incarnation)
        return self._silence_s(row) if row is not None else 0.0

    def down_s(self, instance_id: str, incarnation: str) -> float:
        """For how long this incarnation has been said not to answer and has reported nothing, since whoever says
        so may only have lost sight of it; 0 for one that answers, infinite for one that has ended."""
        row = self._life(instance_id, incarnation)
        if row is None:
            return math.inf
        if row.healthy_since is not None:
            return 0.0
        return time.monotonic() - max(row.down_since, row.store_at, row.stage_at)

    def is_alive(self, instance_id: str, incarnation: str) -> bool:
        """Whether this incarnation is still there, as far as the launcher has said."""
        row = self._life(instance_id, incarnation)
        return row is not None and row.healthy_since is not None

    def is_up(self, instance_id: str) -> bool:
        """Whether it gets requests; one that is not known gets none."""
        row = self._rows.get(instance_id)
        return row is not None and row.up

    def step_budgets(self, instance_id: str) -> tuple[int, int]:
        """Prompt and item tokens that its last step was let have, as it says; zeros where it is held to no SLO."""
        row = self._rows.get(instance_id)
        report = row.stage if row is not None else None
        return (report.token_budget, report.item_budget) if report is not None else (0, 0)

    def instance(self, instance_id: str) -> Instance:
        return self._rows[instance_id].instance

    @property
    def wanted(self) -> frozenset[Role]:
        """Roles that the deployment is to have."""
        return self._wanted or frozenset(row.instance.role for row in self._rows.values())

    def event_addresses(self) -> frozenset[str]:
        """Where instances announce what concerns features, up or not."""
        return frozenset(row.instance.events for row in self._rows.values() if row.instance.events)

    def announcement_addresses(self) -> frozenset[str]:
        """Where anything is announced."""
        instances = [row.instance for row in self._rows.values()]
        loads = [one.load_news for one in instances if one.load_news]
        return self.event_addresses().union(loads, *(one.kv_news for one in instances))

    def live_roles(self) -> frozenset[Role]:
        return frozenset(self._serving())

    def missing(self) -> tuple[Role, ...]:
        """Wanted roles that no live instance has."""
        return tuple(sorted(self.wanted - self.live_roles()))

    def snapshot(self) -> tuple[InstanceView, ...]:
        return tuple(self._view(row, time.monotonic()) for row in self._rows.values())

    async def changed(self, timeout_s: float) -> bool:
        """Wait until an instance comes, goes, goes up or down, drains, or has room in its store again; False when
        `timeout_s` passed first."""
        try:
            async with asyncio.timeout(max(timeout_s, 0)):
                await self._news.wait()
        except TimeoutError:
            return False
        return True

    # Inside.

    def _life(self, instance_id: str, incarnation: str) -> InstanceRow | None:
        """The row of this incarnation, unless it is over."""
        row = self._rows.get(instance_id)
        return row if row is not None and row.instance.incarnation == incarnation else None

    def _view(self, row: InstanceRow, now: float) -> InstanceView:
        tallies = self._ledger.tallies(row.instance.incarnation_id)
        return InstanceView(
            instance=row.instance,
            up=row.serving,
            reason=row.why_not,
            in_flight={work: tally.held for work, tally in tallies.items() if not work.is_aside},
            load=self._load(row),
            report=row.store,
            kv=tuple(report for rank, report in sorted(row.kv.items()) if row.kv_at[rank] >= now - KV_TRUST_S),
            stage=row.stage,
            stage_age_s=now - row.stage_at if row.stage is not None else 0.0,
            pending_s=self._pending_s(row),
            neighbours=tuple(other.instance.id for other in self._sharing(row)),
            draining=row.draining,
            given=whole(tallies).acquired_weight / PER_UNIT,
        )

    def _serving(self) -> Mapping[Role, Sequence[InstanceRow]]:
        """Incarnations that get requests, by role, in order. The same object until somebody comes or goes."""
        if self._by_role is None:
            self._by_role = {}
            for row in self._rows.values():
                if row.serving:
                    self._by_role.setdefault(row.instance.role, []).append(row)
        return self._by_role

    def _settle(self) -> None:
        """Take into service who is healthy and has waited for its links long enough."""
        for row in self._rows.values():
            if row.warm or row.healthy_since is None:
                continue
            row.reason = self._why_cold(row)
            if row.reason:
                if time.monotonic() < row.healthy_since + self._link_grace_s:
                    continue
                logger.warning("%s serves although %s", row.instance.id, row.reason)
            row.warm = True
            self._announce()

    def _why_cold(self, row: InstanceRow) -> str:
        """Returns the first link between this one and the others that are healthy which is not warm."""
        for other in self._rows.values():
            if other is not row and other.healthy_since is not None:
                for sender, receiver in ((row, other), (other, row)):
                    if cold := why_cold(sender.instance, sender.kv, receiver.instance):
                        return cold
        return ""

    def _retire(self, row: InstanceRow) -> None:
        self.prefixes.forget(row.instance.incarnation_id)
        self._retired.add(row.instance.incarnation_id)
        for gone in [one for one in self._retired if not self._ledger.total(one).held]:
            self._retired.remove(gone)
            self._ledger.forget(gone)

    def _sharing(self, row: InstanceRow) -> Sequence[InstanceRow]:
        """Those that compute where it does."""
        if self._neighbours is None:  # an instance came or went
            there = [(other, other.instance.computes_on) for other in self._rows.values()]
            self._neighbours = {
                one.instance.id: [other for other, its in there if other is not one and places & its]
                for one, places in there
            }
        return self._neighbours.get(row.instance.id, ())

    def _pending_s(self, row: InstanceRow) -> float:
        """For how long it keeps its device busy; 0 of one that is not up."""
        if not row.up or row.silent:
            return 0.0
        role, report = row.instance.role, row.fresh
        rate = row.rate or usual_rate([one.rate for one in self._serving().get(role, ())])
        return pending_s(role, self._load(row), report.running if report is not None else 0, rate)

    def _load(self, row: InstanceRow) -> float:
        instance = row.instance
        total = self._ledger.total(instance.incarnation_id)
        return load(instance.role, total, row.fresh, row.counted, both_halves=instance.both_halves)

    def _shared(self, row: InstanceRow, held: int) -> tuple[int, int]:
        """Tokens of a step that requests share, and how many have prompts there: of those that were `held`."""
        report = row.fresh
        if report is None or not report.shared_tokens:
            return 0, 0
        decoding = max(0, report.running - 1) if row.instance.role.decodes else 0
        return report.shared_tokens, max(held, report.waiting + report.running) - decoding

    def _credit(self, row: InstanceRow, unreported: int) -> Credit:
        instance, report, ledger = row.instance, row.fresh, self._ledger
        role, total = instance.role, ledger.total(instance.incarnation_id)
        if report is None:
            return Credit(role, requests=total.held, sequences=max(0, unreported - total.held))
        pending = reported_pending(role, report, both_halves=instance.both_halves)
        done = min(pending, row.rate * (time.monotonic() - row.stage_at))
        tokens = load(role, total, report, row.counted, both_halves=instance.both_halves) - done
        if role.prefills:
            tokens -= ledger.aside(instance.incarnation_id, Work.AHEAD).held_weight / PER_UNIT
        requests = max(total.held, report.waiting + report.running)
        credit = (role, max(0.0, tokens), row.rate, *self._shared(row, total.held), requests)
        if not role.decodes:
            return Credit(*credit, preparing_s=row.preparing_s)
        kv = ledger.aside(instance.incarnation_id, Work.KV)
        unseen = min(kv.held_weight, kv.acquired_weight - row.kv_given) / PER_UNIT
        return Credit(*credit, seats(report, total.held, unreported), kv_room(report, unseen), row.preparing_s)

    def _silence_s(self, row: InstanceRow) -> float:
        last = max(row.store_at, row.stage_at)
        return max(0.0, self._heard_at - max(last, self._heard_since)) if last else 0.0

    def _heard(self, row: InstanceRow, now: float) -> None:
        """It reports now: it is not silent, and others may be. Looks ten times within the limit at most."""
        if now > self._heard_at + self._limit_s / 2:
            self._heard_since = now
        self._heard_at = now
        if row.silent:
            logger.info("%s reports again", row.instance.id)
            row.silent = False
            self._announce()
        if now < self._looked_at + self._limit_s / 10:
            return
        self._looked_at = now
        for other in self._rows.values():
            if other.stage is not None and not other.silent and self._silence_s(other) > self._limit_s:
                logger.warning("%s has stopped to report", other.instance.id)
                other.silent = True
                self._announce()

    def _announce(self) -> None:
        self._by_role = None
        self._news.set()
        self._news = asyncio.Event()
