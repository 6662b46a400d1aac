"""Scheduler side of a consumer: tells vLLM's scheduler whether a request may run, and up to which of its items.

The listener (`listener.py`) turns events and look-ups into features that are here; the scheduler's thread, whose this
is, pins them, and touches neither a network nor a socket, nor waits for more than the store's lock, shortly. Both
share the table of features, and its lock. It runs in the scheduler process because vLLM skips the connector on steps
without tokens (reference: driving prefetch from worker steps starves it).
"""

from __future__ import annotations

import bisect
import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from epd_serve import wire
from epd_serve.engine.ec.announcer import Announcer
from epd_serve.engine.ec.features import Failure, Features, Pin
from epd_serve.engine.ec.listener import FeatureListener
from epd_serve.engine.ec.partial_prefill import SpareBlocks
from epd_serve.engine.ec.slab import FeatureSlab
from epd_serve.engine.ec.step import (
    FeatureLoad,
    FeatureStep,
    feature_keys,
    item_parts,
    items_ahead,
    must_not_recompute,
    not_encoded,
    proxy_request_id,
)
from epd_serve.engine.ec.store_access import SCHEDULER_LOCK_S, open_store, store_report
from epd_serve.kv.params import receive_params
from epd_serve.wiring import StageWiring
from store.errors import StoreError
from store.feature_pool import FeaturePool
from store.keys import whole_of

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class FeatureConsumer:
    """One per scheduler of P, PD or D. Owns the pool.

    Args:
        ranks: workers that have a slab, where the wiring wants one.
        can_fail: vLLM can be told to fail a request.
        media_is_absent: whether some of these items came without their media.
    """

    def __init__(
        self,
        wiring: StageWiring,
        pool: FeaturePool | None = None,
        *,
        ranks: int = 1,
        can_fail: bool = True,
        media_is_absent: Callable[[list[Any]], bool] = lambda items: False,
    ) -> None:
        self._wiring, self._can_fail, self._media_is_absent = wiring, can_fail, media_is_absent
        self._pool = pool if pool is not None else open_store(wiring)
        self._announcer = Announcer(wiring, self._report, list)
        self.features = Features(
            self._pinned_together, recompute_limit=wiring.recompute_limit, wait_s=wiring.feature_wait_s
        )
        self._reserved: set[str] = set()  # requests of D that were let through
        self._fails_if_lost: dict[str, bool] = {}  # by request
        self._step = FeatureStep()
        self._promised: dict[str, list[Pin]] = {}  # in this step
        self._parts: dict[str, dict[str, list[str]]] = {}  # request → parts of its items that come in parts
        self._spare: SpareBlocks | None = None
        self._awaited_at: int | None = None  # where the request that was asked about last has to stop
        self._number = 1  # of the step that comes next
        self._joined: list[str] = []  # parts that this step reads
        self._slab = FeatureSlab(wiring.slab, ranks, self.features, wiring.key_file) if wiring.slab else None
        self._listener = FeatureListener(wiring, self._pool, self.features, self._announcer.changed, self._slab)
        self._announcer.start()

    def allow_partial(self, spare: SpareBlocks) -> None:
        """From now on a request may run up to its first item that is not here, where it fits in these blocks."""
        self._spare = spare

    # --- what vLLM asks ---------------------------------------------------------------------------------------------

    def arrived(self, request: Request) -> None:
        """Called by our scheduler class. Whatever a request that is computed here waits for first, its features are
        looked for now and when they are announced: P asks for them only when D has reserved blocks."""
        if request.mm_features and not self._is_received(request):
            self.look_for(feature_keys(request))

    def look_for(self, keys: Iterable[str]) -> None:
        """A request will ask for these features."""
        if self._wiring.feature_prefetch == "event":
            with self.features.lock:
                self.features.arrived(keys, time.monotonic())
            self._listener.ring()

    def may_run(self, request: Request, num_computed_tokens: int) -> bool:
        """Whether there is something of it to compute. Asked at every step; what is not here is looked for."""
        items = items_ahead(request, num_computed_tokens)
        if not items:
            return self._passed(request)
        settled = self._settled_items(request, items, self._worth(request, items, num_computed_tokens))
        if settled != len(items) and (missing := not_encoded(request)):
            self.give_up(missing, "not_encoded")
        self._awaited_at = items[settled].mm_position.offset if settled is not None and settled < len(items) else None
        return settled is not None

    def _settled_items(self, request: Request, items: Sequence[MultiModalFeatureSpec], worth: int | None) -> int | None:
        """`settled`, where an item is as many features as it has parts: counted in items."""
        if parts := item_parts(request):
            self._parts[request.request_id] = parts
        features = [parts.get(item.identifier, [item.identifier]) for item in items]
        ends = list(itertools.accumulate(map(len, features)))
        settled = self.settled(
            request.request_id,
            list(itertools.chain.from_iterable(features)),
            must_not_recompute=self._must_not_recompute(request),
            worth=None if worth is None else sum(map(len, features[:worth])),
        )
        return None if settled is None else bisect.bisect_right(ends, settled)

    def settled(
        self, request: str, keys: Sequence[str], *, must_not_recompute: bool = False, worth: int | None = None
    ) -> int | None:
        """How many items vLLM may compute, from the first on; None where it may not run the request. O(len(keys)).

        Args:
            keys: of features of its items that its prefill has not passed, in the order of the prompt.
            must_not_recompute: a lost feature fails it (`take_failed`) instead of being encoded here.
            worth: with so many of them it may begin before the others are here. None: it may not.
        """
        with self.features.lock:
            answer = self.features.may_run(
                request, keys, time.monotonic(), must_not_recompute=must_not_recompute, worth=worth
            )
        self._ring_for_news()
        if isinstance(answer, Failure):
            logger.warning("request %s: %d features are lost (%s)", request, len(answer.keys), answer.cause)
            lost = dict.fromkeys(map(whole_of, answer.keys))
            self._announcer.announce(wire.FeatureMissing(proxy_request_id(request), list(lost), answer.cause))
            return None
        return answer

    def tokens_before_awaited(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """How many of these tokens can be computed now. Asks anew: 0.23 does not, for requests that run."""
        if not self.runs_partially(request):
            return num_new_tokens
        if not self.may_run(request, num_computed_tokens):
            return 0
        if self._awaited_at is None:
            return num_new_tokens
        return min(num_new_tokens, self._awaited_at - num_computed_tokens)

    def runs_partially(self, request: Request) -> bool:
        """Whether it has begun although one of its features was not here, and may still not be."""
        return self.features.partial == request.request_id

    def has(self, key: str) -> bool:
        """Whether it is pinned, or all of its parts: they stay until the requests that they are pinned for have
        finished."""
        for features in ([key], *(parts[key] for parts in self._parts.values() if key in parts)):
            held = [lease for one in features if (lease := self.pinned(one)) is not None]
            if len(held) == len(features):
                self._promised[key] = held
                break
        return key in self._promised

    def allocated(self, request: Request, key: str) -> None:
        """vLLM's cache has a place for it. What was not promised is being encoded, even if it came just now."""
        if key in self._promised:
            leases = self._promised[key]
            places = [self._slab.cache(lease.meta.key) if self._slab is not None else None for lease in leases]
            self._step.loads.append(FeatureLoad.of(key, leases, places))

    def step(self, finished: Collection[str], freed: Collection[str] = ()) -> FeatureStep:
        """What the worker is told.

        Args:
            finished: requests that no step can be loading for any more.
            freed: features that vLLM's encoder cache frees in this step.
        """
        self.release(finished)
        self._promised.clear()
        step, self._step = self._step, FeatureStep()
        number, self._number = self._number, self._number + 1
        freed = {*freed, *self._joined}  # what the step before has joined lies in a tensor of its own when this begins
        self._joined = [slot.meta.key for load in step.loads if len(load.slots) > 1 for slot in load.slots]
        if freed and self._slab is not None and self._slab.free(freed, number):
            step.freed_in = number
        return step

    def encoder_cache_reset(self) -> None:
        """vLLM's encoder cache has been emptied, between two steps."""
        if self._slab is not None and self._slab.free(None, self._number):
            self._step.freed_in = self._number

    def pinned(self, key: str) -> Pin | None:
        """A feature that is here and pinned."""
        with self.features.lock:
            return self.features.pinned(key)

    def take_failed(self) -> set[str]:
        """Requests that vLLM must fail now, each exactly once."""
        with self.features.lock:
            return self.features.take_failed()

    def finished(self, request: Request, *, served: bool) -> dict[str, Any]:
        """vLLM has forgotten the request; what it loads may still be loading. Nothing is to be told of it."""
        with self.features.lock:
            self.features.ended(request.request_id)
        return {}

    def waiting(self) -> bool:
        """Whether a request waits for features, its turn to recompute one, or for P to begin."""
        with self.features.lock:
            return self.features.waiting()

    # --- what it is told --------------------------------------------------------------------------------------------

    def give_up(self, keys: Iterable[str], cause: str) -> None:
        """The proxy says that no encoder produced these."""
        now = time.monotonic()
        with self.features.lock:
            for key in keys:
                self.features.failed(key, cause, now)
        self._ring_for_news()

    def keep(self, request: str, keys: Sequence[str]) -> None:
        """The request runs without these features, and could not go on without them if it were preempted: its whole
        prompt is computed here then, its items may have come without their media, and after the first byte the proxy
        has nothing to retry with. So they are used as long as it runs, and evicted last, unless an encoder waits for
        room: who might need its features goes behind one that does."""
        with self.features.lock:
            new = self.features.kept.setdefault(request, keys) is keys
        if new:
            self._listener.ring()

    def release(self, requests: Collection[str]) -> None:
        """These requests have finished: what is pinned for them is given back."""
        for request in requests:
            self._fails_if_lost.pop(request, None)
            self._reserved.discard(request)
            self._parts.pop(request, None)
        with self.features.lock:
            self.features.release(requests)
            if self._slab is not None:
                self._slab.release(requests)
            short = bool(requests) and self.features.without_room()
        if short:
            self._listener.ring()

    def close(self) -> None:
        self._listener.close()
        if self._slab is not None:
            self._slab.close()
        self._announcer.close()
        self._pool.close()  # ends the leases

    def _passed(self, request: Request) -> bool:
        """`may_run` of a request that has all its items behind it."""
        received = self._is_received(request)
        if received and self._is_early(request):
            return False
        with self.features.lock:
            self.features.passed(request.request_id)
        decodes = received or (self._wiring.role.decodes and not self._wiring.both)
        if decodes and self._must_not_recompute(request):  # who only prefills is retried from the start
            self.keep(request.request_id, feature_keys(request))
        return True

    def _is_received(self, request: Request) -> bool:
        """Whether another instance prefills it for this one."""
        if self._wiring.both:
            return receive_params(request.kv_transfer_params, request.request_id) is not None
        return self._wiring.role.takes_kv

    def _is_early(self, request: Request) -> bool:
        """Whether D has to wait with a new request, of which it computes nothing, until P can begin with it."""
        if request.request_id in self._reserved:
            return False
        given_up = not_encoded(request)
        first = next((key for key in feature_keys(request) if key not in given_up), "")
        with self.features.lock:
            early = self.features.early(request.request_id, first, time.monotonic())
        if not early:
            self._reserved.add(request.request_id)
        return early

    def _worth(self, request: Request, items: Sequence[MultiModalFeatureSpec], num_computed_tokens: int) -> int | None:
        """With how many of the items ahead the request may begin before the others are here."""
        seeded = request.sampling_params is not None and request.sampling_params.seed is not None
        if self._spare is None or seeded or self._is_received(request) or not self._spare.fit(request.num_tokens):
            return None
        worth_it = num_computed_tokens + self._spare.worth_tokens
        return next((index for index, item in enumerate(items) if item.mm_position.offset >= worth_it), None)

    def _must_not_recompute(self, request: Request) -> bool:
        """Whether a lost feature fails it."""
        known = self._fails_if_lost.get(request.request_id)
        if known is None:
            known = self._can_fail and (must_not_recompute(request) or self._media_is_absent(request.mm_features))
            self._fails_if_lost[request.request_id] = known
        return known

    def _ring_for_news(self) -> None:
        news, self.features.news = self.features.news, False
        if news:
            self._listener.ring()

    def _pinned_together(self, request: str, keys: Collection[str]) -> list[Pin] | None:
        """In the arena; what it lacks, in the slab. None, too, where one can be copied to the slab before its step."""
        pins: dict[str, Pin] = {}
        try:
            leases = self._pool.arena.lease_all(keys, timeout_s=SCHEDULER_LOCK_S)
            if leases is None and self._slab is not None:
                pins.update(self._slab.hold(keys))
                rest = [key for key in keys if key not in pins]
                leases = self._pool.arena.lease_all(rest, timeout_s=SCHEDULER_LOCK_S) if pins else None
        except StoreError as error:
            logger.warning("%d features are not pinned yet: %s", len(keys), error)
            leases = None
        pins.update((lease.meta.key, lease) for lease in leases or ())
        sizes = {key: pin.meta.nbytes for key, pin in pins.items()}
        if leases is None or (self._slab is not None and not self._slab.promise(request, sizes, time.monotonic())):
            for pin in pins.values():
                pin.release()
            return None
        return [pins[key] for key in keys]

    def _report(self) -> wire.StoreReport:
        with self.features.lock:
            counters, without_room = dict(self.features.counters), self.features.without_room()
        return store_report(self._wiring, self._pool, counters, waiting_puts=without_room)
