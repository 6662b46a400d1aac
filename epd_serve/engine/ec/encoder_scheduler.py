"""Scheduler side of an encoder: which items its requests hold, what the store has already, what consumers need to know.

An item that the arena holds is not encoded: it is pinned, and the worker loads it into vLLM's encoder cache. The load
matters: vLLM's cache manager counts the item as cached from then on, and an encoder whose manager and cache disagree
could neither encode that item again nor give it to anybody.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from epd_serve.engine.compat import ItemMetadata
from epd_serve.engine.ec.parts import with_part_alone
from epd_serve.engine.ec.step import FeatureLoad, FeatureStep, NeededItem, item_keys, remember, to_encode_again
from store.arena import Lease
from store.errors import CorruptFeatureError, StoreError
from store.feature_pool import FeaturePool

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class EncoderScheduler:
    """One per scheduler of E.

    Args:
        pool: whose calls wait shortly at most (`store_access.open_local_store`): they are made on vLLM's own thread.
        collect: metadata of a request's items (`compat.item_metadata`).
        skips: whether items that the store has may be loaded instead of encoded.
    """

    def __init__(self, pool: FeaturePool, collect: Callable[[list[Any]], ItemMetadata], *, skips: bool = True) -> None:
        self._pool, self._collect, self._skips = pool, collect, skips
        self._metadata: OrderedDict[str, dict[str, Any]] = OrderedDict()  # vLLM's processor cache drops it
        self._held: dict[str, tuple[list[str], list[str]]] = {}
        """Request → its keys, and those that the store's word is not taken for."""
        self._offers: dict[str, Lease] = {}  # found in the store during this step
        self._leases: dict[str, list[Lease]] = {}  # request → what its step loads
        self._store_is_stuck = False  # in this step
        self._step = FeatureStep()

    def may_run(self, request: Request, num_computed_tokens: int) -> bool:
        """vLLM considers running this request; called at every step. An encoder waits for nothing."""
        if request.request_id not in self._held:
            request.mm_features[:] = map(with_part_alone, request.mm_features)
            keys, again = self._held[request.request_id] = item_keys(request), to_encode_again(request)
            metadata = self._remember(request)
            for key in dict.fromkeys(keys):
                self._step.needed.append(NeededItem(key, metadata.get(key, {}).get("metadata", {}), key in again))
        return True

    def has(self, key: str) -> bool:
        """Whether the store has this feature, intact: it is pinned from here on, and need not be encoded."""
        if key in self._offers:
            return True
        if not self._skips or self._store_is_stuck or any(key in again for _, again in self._held.values()):
            return False
        try:
            lease = self._pool.arena.lease(key)
        except StoreError as error:  # a stuck one is waited for once in a step: all else is as good as encoded by then
            self._store_is_stuck = not isinstance(error, CorruptFeatureError)
            logger.warning("feature %s is encoded, whether the store has it or not: %s", key, error)
            return False
        if lease is not None:
            self._offers[key] = lease
        return lease is not None

    def allocated(self, request: Request, key: str) -> None:
        """vLLM's cache has a place for it now: what the store has is loaded in this step."""
        lease = self._offers.pop(key, None)
        if lease is not None:
            self._leases.setdefault(request.request_id, []).append(lease)
            self._step.loads.append(FeatureLoad.of(key, [lease], [None]))

    def finished(self, request: Request, *, served: bool) -> ItemMetadata:
        """The request's `ec_transfer_params`; it is held no longer."""
        if served:
            self._step.ended += self._held.get(request.request_id, ([], []))[0]
        self._held.pop(request.request_id, None)
        return self._remember(request)

    def step(self, loaded: Iterable[str], freed: Iterable[str] = ()) -> FeatureStep:
        """What the worker is told.

        Args:
            loaded: finished requests whose loads are surely done.
            freed: what vLLM's cache frees. The worker sees it there.
        """
        for request in loaded:
            self._held.pop(request, None)
            for lease in self._leases.pop(request, ()):
                lease.release()
        for lease in self._offers.values():
            lease.release()
        self._offers.clear()
        self._store_is_stuck = False
        step, self._step = self._step, FeatureStep()
        step.held = list(dict.fromkeys(key for keys, _ in self._held.values() for key in keys))
        return step

    def close(self) -> None:
        self._pool.close()

    def _remember(self, request: Request) -> ItemMetadata:
        items = self._collect(request.mm_features)
        for key, item in items.items():
            item["metadata"] = remember(self._metadata, key, item["metadata"])
        return items
