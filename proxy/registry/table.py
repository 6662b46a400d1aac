"""The status table: which instances exist, which are up, and how loaded each is.

Lives in the proxy's event loop and is called only from there (no locks). The launcher calls `apply`, `mark_up`
and `mark_down` directly; the instances' own reports come in through `report`, `report_kv` and `report_stage`; requests
hold a `Lease` while a stage works for them. What an instance's load is follows from both (`proxy/registry/load.py`).
Choosing among instances is `proxy/routing/policy.py`'s business.

An instance that answers is healthy. It is up, and gets requests, once its KV links to and from the others that are
healthy are warm (`proxy/registry/warm_links.py`), or a grace has passed; from then on links do not matter: retries are
for those. One that stops to report, while others do, leaves until its next report: it may be stopped and still accept
connections.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence

from epd_serve.instances import IncarnationId, Instance
from epd_serve.roles import Role
from epd_serve.wire import CacheReport, KvReport, StageReport, StoreReport
from proxy.registry.instance_state import SILENCE_S, InstanceState, InstanceView, Lease, SilenceWatch, Work
from proxy.registry.ledger import PER_UNIT, Ledger, OwnLedger, total_of
from proxy.registry.load import load, pending_s, reported_rate
from proxy.registry.pause import Pause
from proxy.registry.prefix_index import PrefixIndex
from proxy.registry.warm_links import GRACE_S, why_cold
from proxy.routing.policy import Candidate, usual_rate

logger = logging.getLogger(__name__)


class InstanceTable:
    """Instances by id, in order of first appearance.

    Args:
        link_grace_s: how long a healthy instance waits at most for its KV links.
        ledger: counts the leases; shared where several processes route over the same instances.
        silence_s: after how long without a word an instance leaves, if it ever reported and others still do.

    Attributes:
        pause: while it lasts, new requests wait.
        prefixes: what the instances have cached.
    """

    def __init__(
        self, *, link_grace_s: float = GRACE_S, ledger: Ledger | None = None, silence_s: float = SILENCE_S
    ) -> None:
        self._link_grace_s = link_grace_s
        self._ledger = ledger if ledger is not None else OwnLedger()
        self._silences = SilenceWatch(silence_s)
        self._states: dict[str, InstanceState] = {}
        self._by_role: dict[Role, list[InstanceState]] | None = None
        self._neighbours: dict[str, tuple[InstanceState, ...]] | None = None
        self._retired: list[IncarnationId] = []
        self._picks = 0
        self._wanted: frozenset[Role] = frozenset()
        self.pause = Pause()
        self.prefixes = PrefixIndex()
        self._waiters: set[asyncio.Future[None]] = set()

    # What the launcher says.

    def apply(self, instance: Instance, *, up: bool = True) -> None:
        """Make `instance` known. A new id or a new incarnation starts as `up` says, with nothing in flight;
        the same incarnation keeps its state and only takes over changed fields."""
        state = self._states.get(instance.id)
        self._neighbours = None
        if state is not None and state.instance.incarnation == instance.incarnation:
            state.instance = instance
        else:
            if state is not None:
                self._retire(state)
            since = time.monotonic() if up else None
            reason = "" if up else "starting"
            self._states[instance.id] = InstanceState(instance, up, reason, healthy_since=since, warm=up)
            self._retired = [gone for gone in self._retired if gone != instance.incarnation_id]
            self._settle()
        self._announce()

    def mark_up(self, instance_id: str) -> None:
        """The instance answers. Unknown ids raise KeyError: announce it with `apply` first."""
        state = self._states[instance_id]
        begins = state.healthy_since is None
        if begins:
            state.healthy_since = time.monotonic()
        self._settle()
        if begins and state.warming:
            asyncio.get_running_loop().call_later(self._link_grace_s, self._settle)

    def mark_down(self, instance_id: str, reason: str, *, incarnation: str | None = None) -> None:
        """Send it nothing more. With `incarnation`, a late word about a previous incarnation is ignored."""
        state = self._states[instance_id]
        if incarnation is None or incarnation == state.instance.incarnation:
            if state.healthy_since is not None:
                state.down_since = time.monotonic()
            state.healthy_since = None
            self._set(state, False, reason)
            self._settle()

    def remove(self, instance_id: str) -> None:
        """Forget an instance (re-layout)."""
        self._neighbours = None
        self._retire(self._states.pop(instance_id))
        self._settle()
        self._announce()

    def drain(self, instance_id: str, draining: bool = True) -> None:
        """Give it nothing new, or again something; what it has goes on. Holds for its present incarnation."""
        state = self._states[instance_id]
        if state.draining is not draining:
            state.draining = draining
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

    def report(self, report: StoreReport) -> None:
        """Take in what an instance sees of the MM Store. Reports of unknown instances and past incarnations are
        ignored."""
        state = self._states.get(report.instance)
        if state is None or state.instance.incarnation != report.incarnation:
            return
        was_full = state.full
        state.report, state.reported_at = report, self._silences.note_report()
        self._end_silence(state)
        if was_full and not state.full:
            self._announce()

    def report_kv(self, report: KvReport) -> None:
        """Take in how the KV links of one worker are. Ignored as in `report`, and of ranks that are not there."""
        state = self._states.get(report.instance)
        if state is None or state.instance.incarnation != report.incarnation:
            return
        if 0 <= report.rank < len(state.instance.kv_news):
            state.kv[report.rank] = report
            state.kv_reported_at[report.rank] = time.monotonic()
            self._settle()

    def report_stage(self, report: StageReport) -> None:
        """Take in how busy an instance is. Ignored as in `report`, and when a later one is known."""
        state = self._states.get(report.instance)
        if state is None or state.instance.incarnation != report.incarnation:
            return
        if state.stage is not None and report.seq <= state.stage.seq:
            return
        now = self._silences.note_report()
        self._note(state)
        state.counted = state.acquired.before(now)
        state.stage, state.stage_reported_at = report, now
        self._end_silence(state)
        self._take_out_silent()

    def report_cache(self, report: CacheReport) -> bool:
        """Take in what an instance has cached; ignored as in `report`. Whether it is to be asked for all of it."""
        state = self._states.get(report.instance)
        if state is None or state.instance.incarnation != report.incarnation:
            return False
        return self.prefixes.report(report)

    def suspend(self, instance_id: str, incarnation: str, suspended: bool) -> None:
        """Have this incarnation picked only where nothing else is there, or again like any other. Past ones are
        ignored. Wakes nobody: who waits for a change would only run to an instance that has just one probe to give."""
        state = self._states.get(instance_id)
        if state is not None and state.instance.incarnation == incarnation:
            state.suspended = suspended

    # What requests ask.

    def acquire(self, instance_id: str, work: Work, weight: float = 1.0) -> Lease:
        """Count one piece of work on the current incarnation of `instance_id`; `weight` in the unit of its role."""
        state = self._states[instance_id]
        self._picks += 1
        state.last_pick = self._picks
        lease = Lease(self._ledger, state.instance, work, weight)
        self._note(state)
        return lease

    def note_acquired(self) -> None:
        """Look at what has been acquired. Call it every few milliseconds where other processes share the ledger: what
        they acquire passes through no other method here."""
        for state in self._states.values():
            self._note(state)

    def live(self, role: Role) -> tuple[Candidate, ...]:
        """Instances of `role` that are up, as the policies see them."""
        return tuple(
            [
                Candidate(
                    state.instance.id,
                    state.instance.incarnation,
                    self._load(state),
                    state.last_pick,
                    state.full,
                    _rate(state),
                    state.suspended,
                    tuple([self._pending_s(other) for other in self._sharing(state)]),
                )
                for state in self._serving().get(role, ())
            ]
        )

    def silence_s(self, instance_id: str, incarnation: str) -> float:
        """Returns for how long this incarnation has reported nothing while others did; 0 for one that never reports. A
        stage that hangs looks alive for longer than its reports, which come twice a second, stay away."""
        state = self._states.get(instance_id)
        if state is None or state.instance.incarnation != incarnation:
            return 0.0
        return self._silences.silence_s(state)

    def down_s(self, instance_id: str, incarnation: str) -> float:
        """For how long this incarnation has been said not to answer and has reported nothing, since whoever says
        so may only have lost sight of it; 0 for one that answers, infinite for one that has ended."""
        state = self._states.get(instance_id)
        if state is None or state.instance.incarnation != incarnation:
            return math.inf
        if state.healthy_since is not None:
            return 0.0
        return time.monotonic() - max(state.down_since, state.last_report_at)

    def is_alive(self, instance_id: str, incarnation: str) -> bool:
        """Whether this incarnation is still there, as far as the launcher has said."""
        state = self._states.get(instance_id)
        return state is not None and state.instance.incarnation == incarnation and state.healthy_since is not None

    def is_up(self, instance_id: str) -> bool:
        """Whether it gets requests; one that is not known gets none."""
        state = self._states.get(instance_id)
        return state is not None and state.up

    def step_budgets(self, instance_id: str) -> tuple[int, int]:
        """Prompt and item tokens that its last step was let have, as it says; zeros where it is held to no SLO."""
        state = self._states.get(instance_id)
        report = state.stage if state is not None else None
        return (report.token_budget, report.item_budget) if report is not None else (0, 0)

    def instance(self, instance_id: str) -> Instance:
        return self._states[instance_id].instance

    @property
    def wanted(self) -> frozenset[Role]:
        """Roles that the deployment is to have."""
        return self._wanted or frozenset(state.instance.role for state in self._states.values())

    def event_addresses(self) -> frozenset[str]:
        """Where instances announce what concerns features, up or not."""
        return frozenset(state.instance.events for state in self._states.values() if state.instance.events)

    def announcement_addresses(self) -> frozenset[str]:
        """Where anything is announced."""
        states = self._states.values()
        links = (address for state in states for address in state.instance.kv_news)
        loads = (state.instance.load_news for state in states if state.instance.load_news)
        return self.event_addresses() | frozenset(links) | frozenset(loads)

    def live_roles(self) -> frozenset[Role]:
        return frozenset(self._serving())

    def _serving(self) -> Mapping[Role, Sequence[InstanceState]]:
        """Incarnations that get requests, by role, in order. The same object until somebody comes or goes."""
        if self._by_role is None:
            self._by_role = {}
            for state in self._states.values():
                if state.serving:
                    self._by_role.setdefault(state.instance.role, []).append(state)
        return self._by_role

    def missing(self) -> tuple[Role, ...]:
        """Wanted roles that no live instance has."""
        return tuple(sorted(self.wanted - self.live_roles()))

    def snapshot(self) -> tuple[InstanceView, ...]:
        return tuple(self._view(state) for state in self._states.values())

    def _view(self, state: InstanceState) -> InstanceView:
        tallies = self._ledger.tallies(state.instance.incarnation_id)
        return state.view(
            {work: tally.held for work, tally in tallies.items()},
            self._load(state),
            self._pending_s(state),
            tuple(other.instance.id for other in self._sharing(state)),
            total_of(tallies.values()).acquired_weight / PER_UNIT,
        )

    async def changed(self, timeout_s: float) -> bool:
        """Wait until an instance comes, goes, goes up or down, drains, or has room in its store again; False when
        `timeout_s` passed first."""
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
        for state in self._states.values():
            if not state.warming or state.healthy_since is None:
                continue
            cold = "" if state.warm else self._why_cold(state)
            if cold and time.monotonic() < state.healthy_since + self._link_grace_s:
                state.reason = cold
                continue
            if cold:
                logger.warning("%s serves although %s", state.instance.id, cold)
            state.warm = True
            self._set(state, True, "")

    def _why_cold(self, state: InstanceState) -> str:
        """Returns the first link between this one and the others that are healthy which is not warm."""
        for other in self._states.values():
            if other is not state and other.healthy_since is not None:
                for sender, receiver in ((state, other), (other, state)):
                    if cold := why_cold(sender.instance, sender.kv, receiver.instance):
                        return cold
        return ""

    def _set(self, state: InstanceState, up: bool, reason: str) -> None:
        changed = state.up is not up
        state.up, state.reason = up, reason
        if changed:  # a poller repeats itself every second; those who wait want news
            self._announce()

    def _retire(self, state: InstanceState) -> None:
        state.up = False
        self.prefixes.forget(state.instance.incarnation_id)
        self._by_role = None
        self._retired.append(state.instance.incarnation_id)
        for gone in [one for one in self._retired if not self._held(one)]:
            self._retired.remove(gone)
            self._ledger.forget(gone)

    def _held(self, incarnation_id: IncarnationId) -> int:
        return self._ledger.total(incarnation_id).held

    def _sharing(self, state: InstanceState) -> Iterable[InstanceState]:
        """Those that compute where it does."""
        if self._neighbours is None:  # an instance came or went
            at: dict[tuple[str, str, int], list[InstanceState]] = {}
            for one in self._states.values():
                for place in one.instance.computes_on:
                    at.setdefault(place, []).append(one)
            together: dict[str, dict[str, InstanceState]] = {}
            for one, other in itertools.chain.from_iterable(itertools.permutations(there, 2) for there in at.values()):
                together.setdefault(one.instance.id, {})[other.instance.id] = other
            self._neighbours = {name: tuple(others.values()) for name, others in together.items()}
        return self._neighbours.get(state.instance.id, ())

    def _pending_s(self, state: InstanceState) -> float:
        """For how long it keeps its device busy; 0 of one that is not up."""
        if not state.working:
            return 0.0
        role, report = state.instance.role, state.pending
        rate = _rate(state) or usual_rate(map(_rate, self._serving().get(role, ())))
        return pending_s(role, self._load(state), report.running if report is not None else 0, rate)

    def _load(self, state: InstanceState) -> float:
        instance = state.instance
        total = self._ledger.total(instance.incarnation_id)
        return load(instance.role, total, state.pending, state.counted, both_halves=instance.both_halves)

    def _note(self, state: InstanceState) -> None:
        state.acquired.note(time.monotonic(), self._ledger.total(state.instance.incarnation_id).acquired_weight)

    def _take_out_silent(self) -> None:
        for state in self._silences.newly_silent(self._states.values()):
            logger.warning("%s has stopped to report", state.instance.id)
            state.silent = True
            self._announce()

    def _end_silence(self, state: InstanceState) -> None:
        if state.silent:
            logger.info("%s reports again", state.instance.id)
            state.silent = False
            self._announce()

    def _announce(self) -> None:
        self._by_role = None
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)


def _rate(state: InstanceState) -> float:
    return reported_rate(state.instance.role, state.stage) if state.stage is not None else 0.0
