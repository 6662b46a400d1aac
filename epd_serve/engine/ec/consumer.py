"""Scheduler side of a consumer: answers vLLM's scheduler, and announces what this instance makes of the store.

Owns the table of features and the lock around it. The listener (`listener.py`) turns events and look-ups into features
that are here; the scheduler's thread pins them, and touches neither a network nor a socket. It runs in the scheduler
process because vLLM skips the connector on steps without tokens (reference: driving prefetch from worker steps starves
it).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterable, Sequence

from epd_serve import wire
from epd_serve.engine.ec.announcer import Announcer
from epd_serve.engine.ec.features import Failure, Features
from epd_serve.engine.ec.listener import FeatureListener
from epd_serve.engine.ec.request_facts import proxy_request_id
from epd_serve.engine.ec.store_access import SCHEDULER_LOCK_S, open_store, remote_counters
from epd_serve.wiring import StageWiring
from store.arena import Lease
from store.errors import StoreError
from store.feature_pool import FeaturePool

logger = logging.getLogger(__name__)


class FeatureConsumer:
    """One per scheduler of P, PD or D. Owns the pool."""

    def __init__(self, wiring: StageWiring, pool: FeaturePool | None = None) -> None:
        self._wiring = wiring
        self._pool = pool if pool is not None else open_store(wiring)
        self._announcer = Announcer(wiring, self._report, list)
        self._features = Features(
            self._pinned_together, recompute_limit=wiring.recompute_limit, wait_s=wiring.feature_wait_s
        )
        self._held_back: set[str] = set()  # requests of D
        self._lock = threading.Lock()  # guards the two above
        self._kept: dict[str, tuple[str, ...]] = {}  # request → features that it would need if it were preempted
        self._listener = FeatureListener(
            wiring, self._pool, self._features, self._lock, self._keys_kept, self._announcer.changed
        )
        self._announcer.start()

    def arrived(self, keys: Iterable[str]) -> None:
        """A request for these has arrived, to be computed here. They are looked for now and when they are announced: P
        asks for them only when D has reserved blocks."""
        if self._wiring.feature_prefetch == "event":
            with self._lock:
                self._features.arrived(keys, time.monotonic())
            self._listener.ring()

    def settled(
        self, request: str, keys: Sequence[str], *, must_not_recompute: bool = False, worth: int | None = None
    ) -> int | None:
        """How many items vLLM may compute, from the first on; None where it may not run the request.

        O(len(keys)); waits for the store's lock shortly at most; asked at every step.

        Args:
            keys: identifiers of its items that its prefill has not passed, in the order of the prompt.
            must_not_recompute: a lost feature fails it (`take_failed`) instead of being encoded here.
            worth: with so many of them it may begin before the others are here. None: it may not.
        """
        with self._lock:
            answer = self._features.may_run(
                request, keys, time.monotonic(), must_not_recompute=must_not_recompute, worth=worth
            )
            news, self._features.news = self._features.news, False
        if news:
            self._listener.ring()
        if isinstance(answer, Failure):
            logger.warning("request %s: %d features are lost (%s)", request, len(answer.keys), answer.cause)
            self._announcer.announce(wire.FeatureMissing(proxy_request_id(request), answer.keys, answer.cause))
            return None
        return answer

    def runs_partially(self, request: str) -> bool:
        """Whether this is the request that runs although one of its features is not here."""
        return self._features.partial == request

    def passed(self, request: str) -> None:
        """The request's prefill has all its items behind it."""
        with self._lock:
            self._features.passed(request)

    def held_back(self, request: str, keys: Sequence[str]) -> bool:
        """Whether it is too early for D to reserve blocks: P cannot begin, since an encoder is making the first of the
        request's features. Asked at every step until it is not.

        Args:
            keys: identifiers of its items that some encoder produces, in the order of the prompt.
        """
        with self._lock:
            early = bool(keys) and self._features.makes(keys[0], time.monotonic())
            (self._held_back.add if early else self._held_back.discard)(request)
        return early

    def keep(self, request: str, keys: Sequence[str]) -> None:
        """The request runs without these features, and could not go on without them if it were preempted: its whole
        prompt is computed here then, its items may have come without their media, and after the first byte the proxy
        has nothing to retry with. So they are used as long as it runs, and evicted last, unless an encoder waits for
        room: who might need its features goes behind one that does."""
        if request not in self._kept:
            self._kept[request] = tuple(keys)
            self._listener.ring()

    def give_up(self, keys: Iterable[str], cause: str) -> None:
        """The proxy says that no encoder produced these."""
        now = time.monotonic()
        with self._lock:
            for key in keys:
                self._features.failed(key, cause, now)
            news, self._features.news = self._features.news, False
        if news:
            self._listener.ring()

    def pinned(self, key: str) -> Lease | None:
        """A feature that is here and pinned; it stays until the requests that it is pinned for have finished."""
        with self._lock:
            return self._features.pinned(key)

    def take_failed(self) -> set[str]:
        """Requests that vLLM must fail now, each exactly once."""
        with self._lock:
            return self._features.take_failed()

    def ended(self, request: str) -> None:
        """vLLM has forgotten the request; what it loads may still be loading."""
        with self._lock:
            self._held_back.discard(request)
            self._features.ended(request)

    def release(self, requests: Iterable[str]) -> None:
        """These requests have finished: what is pinned for them is given back."""
        requests = list(requests)
        with self._lock:
            self._features.release(requests)
        for request in requests:
            self._kept.pop(request, None)
        if self._listener.without_room:
            self._listener.ring()

    def waiting(self) -> bool:
        """Whether a request waits for a feature, or for its turn to recompute one."""
        with self._lock:
            return bool(self._held_back) or self._features.waiting()

    def close(self) -> None:
        self._listener.close()
        self._announcer.close()
        with self._lock:
            self._features.close()
        self._pool.close()  # ends the leases

    def _pinned_together(self, keys: Collection[str]) -> list[Lease] | None:
        try:
            return self._pool.arena.lease_all(keys, timeout_s=SCHEDULER_LOCK_S)
        except StoreError as error:
            logger.warning("%d features are not pinned yet: %s", len(keys), error)
            return None

    def _keys_kept(self) -> list[str]:
        return [key for keys in list(self._kept.values()) for key in keys]

    def _report(self) -> wire.StoreReport:
        stats = self._pool.arena.stats()
        with self._lock:
            counters = dict(self._features.counters)
        return wire.StoreReport(
            self._wiring.instance,
            self._wiring.incarnation,
            stats.capacity_bytes,
            stats.used_bytes,
            stats.leased,
            pool=self._pool.state,
            waiting_puts=self._listener.without_room,
            counters={**counters, **remote_counters(self._pool)},
        )
