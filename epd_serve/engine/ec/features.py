"""What a consumer (P, PD, D) knows of features, and what it tells vLLM's scheduler about the requests that need them.

Pure: no sockets, no vLLM; of the store only "pin all of these, or none". One row per feature:

    WANTED     a request needs it, or an encoder has said that it makes it; looked for until its deadline
    READY      it was seen in the arena, whole, for a request, or lately, or is in the slab. Nobody holds it: it may be
               evicted meanwhile
    LOST       it will not come, for a cause. The store's index is the truth, so it was looked up once more before

    what happens                          the row becomes
    need, an encoder begins with it       WANTED    deadline: wait_s from now and each renewal, renew_limit_s in all
    a request for it arrives              ahead: looked for now, and when it is announced; nobody waits for it yet
    found                                 READY     also when it was LOST
    failed, deadline                      WANTED for the last time: LOST when it is not found, or last_look_s are over
    need of another request, renewed      WANTED, when it was LOST
    not there when it is to be pinned     WANTED

A request is told, at every step:

    all of its features READY, and pinned at once       RUN up to the end
    one still WANTED                                    wait
    one LOST, and it must not recompute                 fail, once (metadata only: there are no pixels; or the policy)
    one LOST, and a recompute slot is free              RUN: the others are pinned, vLLM encodes that one here
    one WANTED, but enough READY before it              RUN up to it; one request at a time

**Who has no request for a feature leaves it where it is.** An encoder announces to all; a request comes to the one that
its plan chose, most often while the encoder is at work. What was announced before it came is known to be had by then.

**Nobody who waits holds room.** A request gets all of its pins or none, when it may run; then it runs to its end and
gives them back, and encoders get room. The one exception is the request that runs up to a feature that is awaited: it
holds pins while it waits, and the encoder that makes that feature gets room from all others. What waits may be evicted
meanwhile. So that somebody always gets all of its features together, those of the request that has begun, else of the
one that has waited longest, are used again and again (`protected`), which keeps them from being evicted.
"""

from __future__ import annotations

import enum
import itertools
import math
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from store.feature import FeatureMeta

LOOK_S = 0.05
FETCH_S = 0.5
"""How often a wanted feature is looked for: here, and in the second tier, where asking costs others."""
FULL_S = 0.1
"""The same of one that the arena had no room for."""

SEEN_S = 10.0
"""For how long a feature that was seen before its request came counts as whole, and one that was announced as there."""

_OUTAGE_GRACE_S = 0.5  # a second tier that is gone: an encoder of this host may still put, one that works renews
_MAX_ROWS = 8192
"""Of features, beyond which the oldest goes that no request waits for: a hint of an encoder."""


class Pin(Protocol):
    """What keeps a feature for a request until it ends: a lease of the arena (`store.arena.Lease`), or a hold on its
    place in the slab (`slab.Hold`), which has no `slot`."""

    meta: FeatureMeta
    slot: int
    offset: int

    def release(self) -> None: ...


class State(enum.Enum):
    WANTED = "wanted"
    READY = "ready"
    LOST = "lost"


@dataclass(slots=True)
class Row:
    """One feature.

    Attributes:
        deadline: WANTED: when to go on without it.
        cause: why it is lost, or will be at the deadline.
        last_look: WANTED: once more, then it is lost.
        missed: the store of this host did not have it, so far.
        made_until: an encoder makes it, and was heard of so lately.
        ahead: a request that has arrived will ask for it: it is looked for before that.
        afar_at: when it was last said to be in the second tier.
        requests: that wait for it.
        seen_at: READY: when.
        look_at, fetch_at: when it is looked for again, here and in the second tier.
    """

    state: State
    born: float
    deadline: float
    cause: str = "deadline"
    last_look: bool = False
    missed: bool = False
    made_until: float = 0.0
    ahead: bool = False
    afar_at: float = -math.inf
    seen_at: float = 0.0
    requests: set[str] = field(default_factory=set)
    look_at: float = 0.0
    fetch_at: float = 0.0


class Failure(NamedTuple):
    """What a request lacks that cannot go on, and why (of several causes, the first)."""

    keys: list[str]
    cause: str


class Features:
    """Not thread-safe: who calls anything holds `lock`, and never while it waits for a store. Times are monotonic
    seconds.

    Args:
        pin: pins all of these features for a request, or none (None) where one is not there any more, or not yet where
            it is to be read.
        recompute_limit: requests that recompute at one time: a slow encoder must not turn every P into an encoder.
        wait_s: how long a wanted feature may take, from its first need or its last renewal.
        renew_limit_s: how long an encoder can keep a feature wanted by renewals: it may be stuck, not slow.
        last_look_s: how long the store may take to say that a feature is not there.

    Attributes:
        news: there is something to look for now, which there was not when this was last set to False.
        partial: the request that runs up to a feature that is awaited, or "".
        slots: requests that lack a feature for good, in the order in which they first asked to recompute it: the first
            `recompute_limit` may, however many they lack; the others stand in line.
        kept: request that runs → features that it would need if it were preempted.
    """

    def __init__(
        self,
        pin: Callable[[str, Collection[str]], list[Pin] | None],
        *,
        recompute_limit: int,
        wait_s: float,
        renew_limit_s: float = 120.0,
        last_look_s: float = 3.0,
    ) -> None:
        self._pin, self._recompute_limit = pin, recompute_limit
        self._wait_s = wait_s
        self._renew_limit_s = renew_limit_s
        self._last_look_s = last_look_s
        self._rows: dict[str, Row] = {}
        self._ahead: dict[str, None] = {}  # rows that no request may wait for yet, to be looked for once
        self._keys_of: dict[str, dict[str, None]] = {}  # request → keys that it waits for
        self._waits: dict[str, None] = {}  # requests told to wait when they last asked, the longest first
        self._held: dict[str, dict[str, Pin]] = {}  # request → what is pinned for it
        self._recomputes: dict[str, set[str]] = {}  # request → keys that it encodes itself
        self._failed: dict[str, bool] = {}  # request → whether vLLM was told
        self._early: set[str] = set()  # requests of D that P cannot begin with
        self.lock = threading.Lock()
        self.slots: dict[str, None] = {}
        self.kept: dict[str, Sequence[str]] = {}
        self.partial = ""
        self.news = False
        self.counters: Counter[str] = Counter(corrupt=0)  # there from the start: an alert sees the first one

    # --- what requests are told -------------------------------------------------------------------------------------

    def may_run(
        self, request: str, keys: Sequence[str], now: float, *, must_not_recompute: bool, worth: int | None = None
    ) -> int | Failure | None:
        """How many of its items vLLM may compute, from the first on; None where it has to wait. A `Failure`, once.

        Asked at every step, O(len(keys)).

        Args:
            keys: of the items that its prefill has not passed, in the order of the prompt.
            worth: with so many of them, from the first on, it may begin before the others are here. None: it may not.
        """
        if request in self._failed:
            return None  # vLLM has been told, or will be at the end of this step
        held, recomputes = self._held.get(request, {}), self._recomputes.get(request, set())
        missing = [key for key in dict.fromkeys(keys) if key not in held and key not in recomputes]
        states = {key: self._need(request, key, now) for key in missing}
        lost = [key for key, state in states.items() if state is State.LOST]
        if lost and must_not_recompute:
            self._failed[request] = False
            failure = Failure(lost, self._rows[lost[0]].cause)
            self.counters[f"failed.{failure.cause}"] += 1
            return failure
        settled = State.WANTED not in states.values()
        if not (recomputes or (settled and lost)):  # it needs no slot, or not yet
            self.slots.pop(request, None)
        if settled and (not lost or self._has_slot(request)) and self._take(request, missing, lost, now):
            self._waits.pop(request, None)
            if self.partial == request:
                self.partial = ""
            return len(keys)
        leading = len(list(itertools.takewhile(lambda key: states.get(key, State.READY) is State.READY, keys)))
        if worth is not None and self._may_begin(request, keys, leading, worth, now):
            self._waits.pop(request, None)
            return leading
        self._waits.setdefault(request)
        return None

    def _has_slot(self, request: str) -> bool:
        self.slots.setdefault(request)
        return request in itertools.islice(self.slots, self._recompute_limit)

    def _take(self, request: str, keys: Collection[str], lost: Collection[str], now: float) -> bool:
        """Pin all of these that are not lost. False: one is not there any more, and is looked up once more."""
        there = [key for key in keys if key not in lost]
        leases = self._pin(request, there) if there else []
        if leases is None:
            for key in there:
                self._look_once_more(self._rows[key], "evicted", now)
            return False
        self._held.setdefault(request, {}).update(zip(there, leases, strict=True))
        if lost:
            self._recomputes.setdefault(request, set()).update(lost)
            self.counters.update(f"recomputed.{self._rows[key].cause}" for key in lost)
        for key in keys:
            self._leaves(request, key)
        return True

    def _may_begin(self, request: str, keys: Sequence[str], leading: int, worth: int, now: float) -> bool:
        """Whether to run it up to the first of its items that is not here; what is here is pinned."""
        if self.partial not in ("", request) or not worth <= leading < len(keys):
            return False
        if not self._rows[keys[leading]].missed:  # else it may be here in a moment
            return False
        held = self._held.get(request, {})
        if not self._take(request, [key for key in dict.fromkeys(keys[:leading]) if key not in held], (), now):
            return False
        self.counters["partial_prefills"] += self.partial != request
        self.partial = request
        return True

    def pinned(self, key: str) -> Pin | None:
        """A feature that is pinned for some request; it stays until that has finished."""
        return next((held[key] for held in self._held.values() if key in held), None)

    def take_failed(self) -> set[str]:
        """Requests that vLLM has to fail, each named once."""
        failed = {request for request, told in self._failed.items() if not told}
        self._failed.update(dict.fromkeys(failed, True))
        return failed

    def early(self, request: str, key: str, now: float) -> bool:
        """Whether D has to wait with this request: an encoder is making this feature, its first, so P cannot begin."""
        early = self.makes(key, now)
        (self._early.add if early else self._early.discard)(request)
        return early

    def ended(self, request: str) -> None:
        """vLLM does not know the request any more: it must not be named to it. Its pins stay until `release`."""
        self._early.discard(request)
        if request in self._failed:
            self._failed[request] = True

    def passed(self, request: str) -> None:
        """Its prefill has all its items behind it, or a prefix cache has them all. Should it be preempted, it looks for
        what it has recomputed anew."""
        self._forget(request)

    def release(self, requests: Iterable[str]) -> None:
        """No step that needs these requests' features can be running any more."""
        for request in requests:
            self._failed.pop(request, None)
            self.kept.pop(request, None)
            self._forget(request)
            for lease in self._held.pop(request, {}).values():
                lease.release()

    def _forget(self, request: str) -> None:
        """It waits for nothing, and recomputes nothing."""
        if self.partial == request:
            self.partial = ""
        self._waits.pop(request, None)
        self._recomputes.pop(request, None)
        self.slots.pop(request, None)
        for key in list(self._keys_of.get(request, ())):
            self._leaves(request, key)

    def waiting(self) -> bool:
        """Whether a request waits: for a feature, its turn to recompute one, or for P to begin."""
        return bool(self._keys_of or self._early or len(self.slots) > self._recompute_limit)

    def without_room(self) -> int:
        """How many wanted features the second tier has and the arena no room for."""
        wanted = (self._rows[key] for key in {key for keys in self._keys_of.values() for key in keys})
        return sum(row.cause == "no_room" and row.state is State.WANTED for row in wanted)

    def protected(self, *, kept: bool = True) -> list[str]:
        """Features that are to be used, so that they are not evicted: see above. `kept`: of running requests, too."""
        first = self.partial or next(iter(self._waits), "")
        protected = [key for key in self._keys_of.get(first, ()) if self._rows[key].state is State.READY]
        return protected + [key for keys in self.kept.values() for key in keys if kept]

    # --- what is heard and found ------------------------------------------------------------------------------------

    def arrived(self, keys: Iterable[str], now: float) -> None:
        """A request will ask for these when it may run, and waits for something else before that."""
        for key in keys:
            self._row(key, now).ahead = True
            self._ahead[key] = None

    def made(self, keys: Iterable[str], now: float) -> None:
        """An encoder begins to work on these."""
        for key in keys:
            self._row(key, now).made_until = now + self._wait_s
        self.renew(keys, now)

    def makes(self, key: str, now: float) -> bool:
        """Whether an encoder is making it, and has not fallen silent."""
        return self._known(key).made_until > now

    def renew(self, keys: Iterable[str], now: float) -> None:
        """An encoder holds these: queued, running or being stored."""
        for key in keys:
            row = self._known(key)
            if row.made_until:
                row.made_until = now + self._wait_s
            if row.state is not State.READY and now < row.born + self._renew_limit_s:
                row.state, row.cause, row.last_look = State.WANTED, "deadline", False
                row.deadline = min(now + self._wait_s, row.born + self._renew_limit_s)

    def announced(self, key: str, now: float, *, afar: bool) -> bool:
        """An encoder says that it can be had, in the second tier where that is `afar`. Whether it was being made."""
        row = self._row(key, now)
        if row.state is State.LOST and not row.requests:
            row.state = State.WANTED  # a failure before that is forgotten
        row.look_at = 0.0
        if afar:
            row.afar_at, row.fetch_at = now, 0.0
        if row.ahead:
            self._ahead[key] = None
        return _made_no_more(row)

    def failed(self, key: str, cause: str, now: float) -> bool:
        """The feature will not come: it is looked up once more for those who wait, or for the next who asks. Whether it
        was being made."""
        row = self._row(key, now)
        if row.state is State.WANTED and row.requests and not row.last_look:
            self._look_once_more(row, cause, now)
        elif row.state is State.WANTED and not row.requests:
            row.state, row.cause = State.LOST, cause
        return _made_no_more(row)

    def hampered(self, key: str, cause: str, deadline: float) -> None:
        """The feature may still come, but this stands in its way, and there is no use in waiting beyond `deadline`."""
        row = self._known(key)
        if row.state is State.WANTED and not row.last_look:
            row.cause, row.deadline = cause, min(row.deadline, deadline)

    def to_look_for(self, now: float) -> Iterator[tuple[str, Row]]:
        """Features that requests wait for and that are due to be looked for, in the order in which they were needed;
        then those of requests that have arrived."""
        ahead, self._ahead = self._ahead, {}
        for key in dict.fromkeys(itertools.chain(*self._keys_of.values(), ahead)):
            if self.wants(key, ahead=True) and (row := self._rows[key]).look_at <= now:
                row.look_at = now + LOOK_S
                yield key, row

    def wants(self, key: str, *, ahead: bool = False) -> bool:
        """Whether a request waits for it, and it is not here. `ahead`: or will ask for it."""
        row = self._known(key)
        return bool(row.requests or (ahead and row.ahead)) and row.state is not State.READY

    def awaits(self, key: str, now: float) -> bool:
        """Whether a request waits for it, or has lately had it looked for and will ask."""
        row = self._known(key)
        return bool(row.requests or row.ahead or (row.state is State.READY and row.seen_at + SEEN_S > now))

    def fetch_due(self, key: str, now: float) -> bool:
        """True at most every `FETCH_S` for a feature: fetch it now. Before its request asks, only what was lately said
        to be there: of what was sent long ago a prefix cache may have all that is needed."""
        row = self._known(key)
        due = row.fetch_at <= now and bool(row.requests or row.afar_at + SEEN_S > now)
        if due:
            row.fetch_at = now + FETCH_S
        return due

    def not_fetched(self, key: str, why: str, now: float) -> None:
        """The second tier did not deliver it: it is `missing` there, or `corrupt`, or is `unavailable` itself, or there
        is `no_room` for it here, which is tried again until the request's deadline."""
        self.counters[f"fetch_{why}"] += 1
        self.counters["corrupt"] += why == "corrupt"
        row = self._known(key)
        if row.last_look:
            self.not_found(key)
        elif why == "no_room" and self.wants(key):
            self.hampered(key, why, float("inf"))
            row.fetch_at = now + FULL_S
        elif why == "corrupt":
            self.failed(key, why, now)
        elif why == "unavailable":
            self.hampered(key, why, now + _OUTAGE_GRACE_S)

    def found(self, key: str, now: float) -> None:
        """It is in the arena, or in the slab, and whole."""
        row = self._row(key, now)
        if row.ahead and not row.requests:
            self.counters["prefetched"] += 1
        row.state, row.last_look, row.seen_at, row.ahead = State.READY, False, now, False

    def look_now(self, key: str) -> None:
        """Something has changed for it: it is looked for in this turn, where it is wanted."""
        self._known(key).look_at = 0.0

    def missed(self, key: str) -> bool:
        """The store of this host does not have it, so far. True where that is news about a feature that is wanted."""
        row = self._known(key)
        news, row.missed = not row.missed, True
        return news

    def not_found(self, key: str) -> None:
        """The store does not have it, which was looked for once more."""
        row = self._known(key)
        if row.state is State.WANTED and row.last_look:
            self._lose(row)

    # --- rows -------------------------------------------------------------------------------------------------------

    def _need(self, request: str, key: str, now: float) -> State:
        """A request needs this feature: what became of it."""
        row = self._row(key, now)
        if request not in row.requests:
            if not row.requests:
                row.born, row.fetch_at = now, 0.0
            row.requests.add(request)
            self._keys_of.setdefault(request, {})[key] = None
            if row.state is not State.READY and self.pinned(key) is not None:
                row.state = State.READY
            elif row.state is State.READY and row.seen_at + SEEN_S < now:
                row.state = State.WANTED
            if row.state is State.LOST:  # the encoder may have failed before this request got here
                self._look_once_more(row, row.cause, now)
            elif row.state is State.WANTED:
                row.deadline, row.look_at, self.news = max(row.deadline, now + self._wait_s), 0.0, True
        if row.state is State.WANTED and now >= row.deadline:
            if row.last_look:
                self._lose(row)
            else:
                self._look_once_more(row, row.cause, now)
        return row.state

    def _row(self, key: str, now: float) -> Row:
        row = self._rows.get(key)
        if row is None:
            if len(self._rows) >= _MAX_ROWS:
                self._rows.pop(next((key for key, row in self._rows.items() if not row.requests), ""), None)
            row = self._rows[key] = Row(State.WANTED, now, now + self._wait_s)
        return row

    def _known(self, key: str) -> Row:
        """Its row, or where there is none, one that says so and that nobody sees again."""
        return self._rows.get(key) or Row(State.LOST, 0.0, 0.0, missed=True, fetch_at=float("inf"))

    def _leaves(self, request: str, key: str) -> None:
        if (keys := self._keys_of.get(request)) is not None:
            keys.pop(key, None)
            if not keys:
                del self._keys_of[request]
        row = self._rows[key]
        row.requests.discard(request)
        if not row.requests:
            row.ahead = False
            if row.state is State.READY:  # whoever comes next sees for itself whether it is whole
                row.state = State.WANTED

    def _look_once_more(self, row: Row, cause: str, now: float) -> None:
        row.state, row.cause, row.last_look = State.WANTED, cause, True
        row.deadline, row.look_at, row.fetch_at, self.news = now + self._last_look_s, 0.0, 0.0, True

    def _lose(self, row: Row) -> None:
        row.state = State.LOST
        self.counters[f"lost.{row.cause}"] += 1


def _made_no_more(row: Row) -> bool:
    """It can be had, or will not come. Whether it was being made until now."""
    made, row.made_until = bool(row.made_until), 0.0
    return made
