"""Worker side of an encoder: what leaves it, what it loads instead of encoding, and what it says about both, beforehand
(`wire.FeatureExpected`) and afterwards.

The model step only hands tensors over (`writer.py` puts and announces behind its back, EPD-Serve §3.2). An
item that vLLM finds in its own encoder cache is not encoded and `save_caches` never fires for it: it is announced
again, and put again if the store has lost it. Items that are queued, running or on their way into the store are
renewed at the consumers.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from typing import Any

import torch

from epd_serve import wire
from epd_serve.engine.ec.announcer import Announcer
from epd_serve.engine.ec.step import FeatureStep, remember
from epd_serve.engine.ec.store_access import open_store, store_report
from epd_serve.engine.ec.writer import FeatureWriter
from epd_serve.trace import DeviceTrace, Trace
from epd_serve.wiring import StageWiring
from npu_ops.torch_memory import memory_here
from store.errors import StoreError
from store.feature_pool import FeaturePool

logger = logging.getLogger(__name__)


class FeatureProducer:
    """One per encoder, in the worker of rank 0. Every rank computes the whole feature; one of them stores it."""

    def __init__(
        self, wiring: StageWiring, device: torch.device | str = "cpu", pool: FeaturePool | None = None
    ) -> None:
        self._wiring = wiring
        self._pool = pool if pool is not None else open_store(wiring)
        self._memory = memory_here(torch.device(device).type)  # this is the model's thread, which has set its device
        self._trace = Trace(wiring.trace_path, wiring.instance)
        self._device_trace = DeviceTrace(self._trace, self._memory)
        self._cache: dict[str, torch.Tensor] = {}
        self._awaited: set[str] = set()  # needed, and neither encoded, loaded nor found in vLLM's cache yet
        self._again: set[str] = set()  # put anew, whatever the store says
        self._lock = threading.Lock()  # guards the following, of which the announcer and the writer know
        self._held: set[str] = set()
        self._told: set[str] = set()  # of these: announced, or as failed
        self._metadata: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._counters: Counter[str] = Counter()
        # Bound here: an encoder nobody hears must not start.
        self._announcer = Announcer(wiring, self._report, self._pending)
        bound_bytes = wiring.feature_queue_bytes
        self._writer = FeatureWriter(self._pool, self._tell, self._trace, bound_bytes, memory=self._memory)
        self._announcer.start()

    def step(self, step: FeatureStep, cache: dict[str, torch.Tensor] | None = None) -> None:
        """Before the step runs: what vLLM's cache holds of the needed items will not be encoded again.

        Args:
            cache: vLLM's encoder cache; None where vLLM does not hand it over (it is known from the first save on).
        """
        self._cache = cache if cache is not None else self._cache
        with self._lock:
            self._held = set(step.held)
            self._told &= self._held
            for item in step.needed:
                self._told.discard(item.key)
                remember(self._metadata, item.key, item.metadata)
        # Whatever becomes of them in this step: who comes after E may prepare its requests meanwhile.
        if expected := {item.key: item.metadata for item in step.needed if item.metadata}:
            self._announcer.announce(wire.FeatureExpected(expected, self._wiring.incarnation))
        self._load(step)
        loaded = {slot.key for slot in step.loads}
        for item in step.needed:
            self._trace.stamp(item.key, "encode_start")
            if item.again:
                self._tell(item.key, "reencode_requested")
                self._again.add(item.key)
            if item.key in loaded:
                continue  # announced already
            if item.key in self._cache:
                self._tell(item.key, "announced_again")
                self._put(item.key)
            else:
                self._awaited.add(item.key)
        self._settle(step)

    def save(self, cache: dict[str, torch.Tensor], key: str) -> None:
        """A feature was encoded in this step. Returns at once; waits, not for good, when too many puts are behind."""
        self._cache = cache  # vLLM's encoder cache: one dict for the life of the worker
        self._device_trace.stamp(key, "encoded")
        self._tell(key, "encoded")
        self._awaited.discard(key)
        self._put(key)

    def close(self) -> None:
        self._writer.close()
        self._device_trace.close()
        self._announcer.close()
        self._pool.close()

    def _load(self, step: FeatureStep) -> None:
        """What the store has and the scheduler pinned is loaded, not encoded: vLLM counts it as cached from now on."""
        for slot in step.loads:
            self._awaited.discard(slot.key)
            if slot.key not in self._cache:
                try:
                    self._cache[slot.key] = slot.read(self._pool.arena, self._memory)
                    self._tell(slot.key, "encode_skipped")
                except StoreError:
                    logger.exception("feature %s was not loaded", slot.key)
            self._writer.announce(slot.key)

    def _settle(self, step: FeatureStep) -> None:
        """A request that was served without one of its items: whoever waits for that item is told now."""
        for key in self._awaited.intersection(step.ended):
            logger.error("feature %s was neither encoded nor in the encoder cache", key)
            self._writer.announce(key)  # or as failed, if the store lacks it too
        self._awaited.intersection_update(step.held)

    def _put(self, key: str) -> None:
        again = key in self._again
        self._again.discard(key)
        self._writer.put(key, self._cache[key], again=again)

    def _tell(self, key: str, event: str, nbytes: int = 0, *, pooled: bool = False, reason: str = "") -> None:
        """A word about a key: counted as `event`, and announced where somebody waits for it."""
        with self._lock:
            self._counters[event] += 1
            metadata = self._metadata.get(key, {})
            if reason or nbytes:
                self._told.add(key)
        if reason:
            self._announcer.announce(wire.FeatureFailed(key, reason))
        elif nbytes:
            self._announcer.announce(
                wire.FeatureReady(key, nbytes, self._wiring.incarnation, self._wiring.arena_id, pooled, metadata)
            )
        self._announcer.changed()

    def _pending(self) -> list[str]:
        with self._lock:
            unsaid = self._held - self._told
        return list(dict.fromkeys((*unsaid, *self._writer.pending())))

    def _report(self) -> wire.StoreReport:
        with self._lock:
            encoding, counters = len(self._held - self._told), dict(self._counters)
        return store_report(
            self._wiring, self._pool, counters, waiting_puts=self._writer.waiting_puts, encoding=encoding
        )
