"""One incarnation of one instance as the status table keeps it: what requests hold of it, how loaded that makes it
together with its own report, what others see of it, and when its KV links are warm.

Counts only ever grow: acquired and released are counted apart, so that a process that shares its counts with others
writes cells of its own, and "since then" is a difference. What follows from counts and reports is pure.

The unit of a weight depends on the kind: item tokens for E, requests for D, prompt tokens for all that prefill (and one
for every running request where those decode, too). This is the global instance status table of EPD-Serve §3.4, whose
least-loaded-first asks for pending work of the right kind.

Warm links are part of being ready, for a first transfer costs seconds more. Senders open and probe their links by
themselves, and report them (`epd_serve.wire.KvReport`). A pair of healthy stages is warm when all workers of the sender
have reported in this incarnation, and no link of theirs to the other one is still being opened. Links that nobody
reports are not waited for: a sender that tells no news, or a receiver that came after the sender and that it meets with
its first transfer. The status table asks this at the start of an incarnation only, and for `GRACE_S` at most.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from operator import add
from typing import NamedTuple, Protocol

from epd_serve.instances import IncarnationId, Instance
from epd_serve.roles import Role
from epd_serve.wire import KvLink, KvReport, StageReport, StoreReport

PER_UNIT = 1000
"""Weights are counted in thousandths, as integers: sums stay exact however long an incarnation is."""

_E, _D = Role.E, Role.D  # looking up a member calls a function before Python 3.12, and this is asked for each choice

REPORT_TRUST_S = 3.0
"""Instances report every 0.5 s at least: what one that has fallen silent said of its store or load holds no more."""

KV_TRUST_S = 5.0
"""The same of KV links, which are reported every second at least."""

REPORT_EVERY_S = 0.05
"""A busy instance reports as often as this. What it was given since its last report but one may have come too late for
the last one: it reaches the stage's scheduler, and the report this proxy, some time after it was acquired."""

PREPARING_HALF_LIFE_S, MOST_PREPARING_S = 10.0, 0.5

GRACE_S = 15.0
"""How long a healthy instance waits at most for its KV links."""


class Work(StrEnum):
    """Kinds of work that a request asks of an instance."""

    ENCODE = "encode"
    PREFILL = "prefill"
    DECODE = "decode"
    AHEAD = "ahead"
    KV = "kv"

    @property
    def is_aside(self) -> bool:
        """Counted beside the others, of work that is counted among them: prompts that cannot be computed yet, for their
        items are being encoded; tokens whose KV is to be held where they are decoded."""
        return self is Work.AHEAD or self is Work.KV


class Tally(NamedTuple):
    """Counts of one kind of work on one incarnation since it is known; weights in thousandths of a unit."""

    acquired: int = 0
    released: int = 0
    acquired_weight: int = 0
    released_weight: int = 0

    @property
    def held(self) -> int:
        return self.acquired - self.released

    @property
    def held_weight(self) -> int:
        return self.acquired_weight - self.released_weight


NO_TALLY = Tally()
NOTHING: Mapping[Work, Tally] = dict.fromkeys(Work, NO_TALLY)


def total_of(tallies: Iterable[Tally]) -> Tally:
    """All of them together; of at least one."""
    return Tally(*map(sum, zip(*tallies, strict=True)))


def whole(tallies: Mapping[Work, Tally]) -> Tally:
    """All kinds of work together, but for what is counted aside."""
    return total_of(tally for work, tally in tallies.items() if not work.is_aside)


class Ledger:
    """Counts of leases, here those of a proxy that is alone; subclasses count where several processes see it. Called
    from one thread of a process; none of it waits."""

    def __init__(self) -> None:
        self._tallies: dict[IncarnationId, dict[Work, Tally]] = {}
        self._totals: dict[IncarnationId, Tally] = {}  # looked at for each choice

    def acquire(self, incarnation_id: IncarnationId, work: Work, weight: int) -> None:
        """This process has given `incarnation_id` one more piece of `work`; weight >= 0."""
        self._count(incarnation_id, work, Tally(acquired=1, acquired_weight=weight))

    def release(self, incarnation_id: IncarnationId, work: Work, weight: int) -> None:
        """One that this process acquired has ended, with the weight it was acquired with."""
        held = self.tallies(incarnation_id)[work]
        assert held.held > 0 and held.held_weight >= weight, (
            f"released more {work} of {incarnation_id} than was acquired"
        )
        self._count(incarnation_id, work, Tally(released=1, released_weight=weight))

    def tallies(self, incarnation_id: IncarnationId) -> Mapping[Work, Tally]:
        """Returns the counts of all processes that share this ledger; every `Work` is in it. Unknown incarnations have
        held nothing."""
        return self._tallies.get(incarnation_id, NOTHING)

    def total(self, incarnation_id: IncarnationId) -> Tally:
        """Returns the same of all kinds of work together, but for what is counted aside."""
        return self._totals.get(incarnation_id, NO_TALLY)

    def aside(self, incarnation_id: IncarnationId, work: Work) -> Tally:
        """Returns the counts of one kind of work."""
        return self.tallies(incarnation_id)[work]

    def forget(self, incarnation_id: IncarnationId) -> None:
        """Nothing is held of `incarnation_id` any more, by anybody, and this process will not acquire there again."""
        self._tallies.pop(incarnation_id, None)
        self._totals.pop(incarnation_id, None)

    def _count(self, incarnation_id: IncarnationId, work: Work, more: Tally) -> None:
        tallies = self._tallies.setdefault(incarnation_id, dict(NOTHING))
        tallies[work] = Tally(*map(add, tallies[work], more))
        if not work.is_aside:
            self._totals[incarnation_id] = whole(tallies)


class Lease:
    """One unit of in-flight work on one incarnation, which a context may hold. Released exactly once, whoever calls
    first.

    Args:
        weights: by work; of that which is not aside in the unit of the instance's role, >= 0.
    """

    def __init__(self, ledger: Ledger, instance: Instance, weights: Mapping[Work, float]) -> None:
        assert min(weights.values()) >= 0, f"a lease weighs {weights}"
        self.instance = instance
        self._ledger = ledger
        self._held = {work: round(weight * PER_UNIT) for work, weight in weights.items()}
        for work, weight in self._held.items():
            ledger.acquire(instance.incarnation_id, work, weight)

    def release(self) -> None:
        for work in list(self._held):
            self.over(work)

    def over(self, work: Work) -> None:
        """That of it has ended. Any number of times."""
        weight = self._held.pop(work, None)
        if weight is not None:
            self._ledger.release(self.instance.incarnation_id, work, weight)

    def __enter__(self) -> Instance:
        return self.instance

    def __exit__(self, *_: object) -> None:
        self.release()


class Reported(Protocol):
    """What of a `StageReport` loads are made of; a simulated stage has it without making a report."""

    @property
    def waiting(self) -> int: ...
    @property
    def running(self) -> int: ...
    @property
    def pending_prompt_tokens(self) -> int: ...
    @property
    def pending_item_tokens(self) -> int: ...
    @property
    def prompt_tokens_per_s(self) -> float: ...
    @property
    def item_tokens_per_s(self) -> float: ...


def reported_pending(role: Role, report: Reported, *, both_halves: bool = False) -> float:
    """What a report says is pending, in the unit of the role. `both_halves`: a P may have been D and decode yet."""
    if role is _E:
        return report.pending_item_tokens
    if role is _D:
        return report.waiting + report.running
    return report.pending_prompt_tokens + (report.running if role.decodes or both_halves else 0)


def reported_rate(role: Role, report: Reported) -> float:
    """How much of that it gets done per second of busy time; 0 while unknown. Of a D, whose requests end when they
    like, nobody knows."""
    if role is _E:
        return report.item_tokens_per_s
    return 0.0 if role is _D else report.prompt_tokens_per_s


def pending_s(role: Role, load: float, running: int, rate: float) -> float:
    """For how long an instance keeps its device busy; infinite while it decodes, since nobody knows how long that is.

    Args:
        load: pending work. running: requests that it runs. rate: how much of its load it gets done per second.
    """
    if role.decodes and running:
        return math.inf
    return 0.0 if role is _D else load / rate  # KV that arrives at a D takes no turn of its device


def load(role: Role, total: Tally, report: StageReport | None, counted: int, *, both_halves: bool = False) -> float:
    """Pending work of one incarnation.

    Without a report: what is in flight. With one: what it says is pending, and what it cannot contain: whatever was
    acquired since, and requests in flight beyond those that the stage counted (its API server still prepares them: for
    a large image that takes longer than any lag), at the mean weight. Never more than what is in flight is added, so
    nothing is left of leases that have ended.

    Args:
        total: of all kinds of work. report: the last one, if it is fresh.
        counted: weight, in thousandths, acquired in total that may be in the report.
    """
    held, held_weight = total.held, total.held_weight
    if report is None:
        return held_weight / PER_UNIT
    since = total.acquired_weight - counted
    unseen = held_weight * max(0, held - report.waiting - report.running) / held if held else 0.0
    return reported_pending(role, report, both_halves=both_halves) + min(held_weight, max(since, unseen)) / PER_UNIT


@dataclass(frozen=True)
class InstanceView:
    """A row of the table as others may see it.

    Attributes:
        up: it gets requests. reason: why not.
        load: pending work, in the unit of its role (`proxy/registry/instance_state.py`).
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
        kv_given: the same of KV.
        came, came_s: requests that its API server got, and how long it had them before its scheduler did, in all; both
            of late, up to `stage`. taken: requests acquired until then.
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
    kv_given: int = 0
    came: float = 0.0
    came_s: float = 0.0
    taken: int = 0
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

    def prepared(self, total: Tally, report: StageReport, now: float) -> None:
        """Requests that are held of it and that its scheduler does not report are being prepared: by their number and
        by how many come it is known for how long (Little's law). To be called before `stage` is replaced."""
        passed_s = min(now - self.stage_at, REPORT_TRUST_S)
        fades = 0.5 ** (passed_s / PREPARING_HALF_LIFE_S)
        preparing = max(0, total.held - report.waiting - report.running)
        self.came_s = fades * self.came_s + preparing * passed_s
        self.came, self.taken = fades * self.came + total.acquired - self.taken, total.acquired

    @property
    def preparing_s(self) -> float:
        """For how long, beyond that of a report: what has come since the last one seems to be prepared, too."""
        took_s = self.came_s / self.came - REPORT_EVERY_S if self.came >= 1 else 0.0
        return min(max(took_s, 0.0), MOST_PREPARING_S)

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
