"""Scheduler side of a consumer: answers vLLM's scheduler, and announces what this instance makes of the store.

Owns the desk and the lock around it. The listener (`listener.py`) turns events and look-ups into pins behind it; the
scheduler's thread never touches the store, a network or a socket. It runs in the scheduler process because vLLM skips
the connector on steps without tokens (reference: driving prefetch from worker steps starves it).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence

from epd_serve import wire
from epd_serve.engine.ec.announcer import Announcer
from epd_serve.engine.ec.expected_features import ExpectedFeatures
from epd_serve.engine.ec.feature_desk import Admission, FeatureDesk
from epd_serve.engine.ec.feature_table import FeatureTable
from epd_serve.engine.ec.kept_features import KeptFeatures
from epd_serve.engine.ec.listener import FeatureListener
from epd_serve.engine.ec.request_facts import proxy_request_id
from epd_serve.engine.ec.store_access import open_store, remote_counters
from epd_serve.wiring import StageWiring
from store.arena import Lease
from store.feature_pool import FeaturePool

logger = logging.getLogger(__name__)


class FeatureConsumer:
    """One per scheduler of P, PD or D. Owns the pool."""

    def __init__(self, wiring: StageWiring, pool: FeaturePool | None = None) -> None:
        self._wiring = wiring
        self._pool = pool if pool is not None else open_store(wiring)
        self._announcer = Announcer(wiring, self._report, list)
        capacity = self._pool.arena.stats().capacity_bytes
        # Only who prefills is worth prefetching for: D needs features after a preemption alone, and looks them up then.
        prefetches = wiring.prefills and wiring.feature_prefetch == "event"
        table = FeatureTable(wait_s=wiring.feature_wait_s, max_prefetched_bytes=capacity // 4 if prefetches else 0)
        self._desk = FeatureDesk(table, wiring.recompute_limit)
        self._expected = ExpectedFeatures(wiring.feature_wait_s)
        self._held_back: set[str] = set()  # requests of D
        self._lock = threading.Lock()  # guards the three above, and the desk's table
        self._kept = KeptFeatures(self._pool.arena.lease, max_bytes=capacity // 4)
        self._listener = FeatureListener(
            wiring,
            self._pool,
            self._desk,
            self._expected,
            self._lock,
            self._kept,
            self._announcer.changed,
            max_bytes=capacity // 4,
        )
        self._announcer.start()

    def arrived(self, keys: Iterable[str]) -> None:
        """A request for these has arrived. What is here is pinned as if it had just been announced: P asks for it only
        when D has reserved blocks."""
        self._listener.look_ahead(keys)

    def settled(
        self, request: str, keys: Sequence[str], *, must_not_recompute: bool = False, worth: int | None = None
    ) -> int | None:
        """How many items vLLM may compute, from the first on; None where it may not run the request.

        O(len(keys)), never blocks; asked at every step.

        Args:
            keys: identifiers of its items that its prefill has not passed, in the order of the prompt.
            must_not_recompute: a lost feature fails it (`take_failed`) instead of being encoded here.
            worth: with so many of them it may begin before the others are here. None: it may not.
        """
        now = time.monotonic()
        with self._lock:
            seen = sum(self._desk.table.requested(key) for key in keys)
            doubts = self._desk.table.doubts
            admission = self._desk.admission(request, keys, now, must_not_recompute=must_not_recompute, worth=worth)
            failure = self._desk.failure(request, keys) if admission is Admission.FAIL else None
            news = seen < len(keys) or doubts != self._desk.table.doubts
            part = self._desk.leading(request, keys, now) if admission is Admission.PARTIAL else None
        if failure is not None:
            logger.warning("request %s: %d features are lost (%s)", request, len(failure.keys), failure.cause)
            self._announcer.announce(wire.FeatureMissing(proxy_request_id(request), failure.keys, failure.cause))
        if news and admission in (Admission.WAIT, Admission.PARTIAL):
            self._listener.ring()
        return len(keys) if admission is Admission.RUN else part

    def runs_partially(self, request: str) -> bool:
        """Whether this is the request that runs although one of its features is not here."""
        return self._desk.partial == request

    def passed(self, request: str) -> None:
        """The request's prefill has all its items behind it."""
        with self._lock:
            self._desk.passed(request)

    def held_back(self, request: str, keys: Sequence[str]) -> bool:
        """Whether it is too early for D to reserve blocks: P cannot begin, since an encoder is making the first of the
        request's features. Asked at every step until it is not.

        Args:
            keys: identifiers of its items that some encoder produces, in the order of the prompt.
        """
        with self._lock:
            early = bool(keys) and self._expected.expects(keys[0], time.monotonic())
            (self._held_back.add if early else self._held_back.discard)(request)
        return early

    def keep(self, request: str, keys: Sequence[str]) -> None:
        """The request runs without these features, and could not go on without them if it were preempted."""
        if self._kept.keep(request, keys):
            self._listener.ring()

    def give_up(self, keys: Iterable[str], cause: str) -> None:
        """The proxy says that no encoder produced these."""
        now = time.monotonic()
        with self._lock:
            doubts = self._desk.table.doubts
            for key in keys:
                self._desk.table.failed(key, cause, now)
            news = doubts != self._desk.table.doubts
        if news:
            self._listener.ring()

    def pinned(self, key: str) -> Lease | None:
        """A feature that is here, verified and pinned; it stays until the requests that need it have finished."""
        with self._lock:
            return self._desk.table.pinned(key)

    def take_failed(self) -> set[str]:
        """Requests that vLLM must fail now, each exactly once."""
        with self._lock:
            return self._desk.take_failed()

    def ended(self, request: str) -> None:
        """vLLM has forgotten the request; what it loads may still be loading."""
        with self._lock:
            self._held_back.discard(request)
            self._desk.ended(request)

    def release(self, requests: Iterable[str]) -> None:
        """These requests have finished: what only they needed is given back."""
        requests = list(requests)
        with self._lock:
            self._desk.release(requests)
        self._kept.release(requests)
        if self._listener.without_room:
            self._listener.ring()

    def waiting(self) -> bool:
        """Whether a request waits for a feature, or for its turn to recompute one."""
        with self._lock:
            return bool(self._held_back) or self._desk.waiting()

    def close(self) -> None:
        self._listener.close()
        self._announcer.close()
        with self._lock:
            self._desk.table.close()
        self._pool.close()  # ends the leases

    def _report(self) -> wire.StoreReport:
        stats = self._pool.arena.stats()
        with self._lock:
            lost = {f"lost.{cause}": count for cause, count in self._desk.table.lost_by_cause.items()}
            counters = {**self._desk.counters, **lost}
        return wire.StoreReport(
            self._wiring.instance,
            self._wiring.incarnation,
            stats.capacity_bytes,
            stats.used_bytes,
            stats.leased,
            pool=self._pool.state,
            waiting_puts=self._listener.without_room,
            counters={**counters, **self._kept.counters(), **remote_counters(self._pool)},
        )
