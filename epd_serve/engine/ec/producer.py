"""Worker side of an encoder: the way of a feature from the model to where consumers can get it, and what is said of it.

The model step only hands tensors over (EPD-Serve §3.2). What it begins with is announced beforehand
(`wire.FeatureExpected`); what comes of it is queued, stored and published. The writer puts a feature into the arena and
announces it afterwards, never before: consumers of the same host need no more. Where there is a second tier, a thread
of its own then publishes it there, for other hosts: its turns are as long as the network wants. An item that vLLM finds
in its own encoder cache is not encoded and `save_caches` never fires for it: it is announced again, and put again if
the store has lost it. Items that are queued, running or on their way into the store are renewed at the consumers.

A full arena is back-pressure: the writer waits for room, what is behind it waits too, and the model's thread where the
queue is full. None waits for good: a feature that finds no room in time is announced as failed, and whoever needs it
recomputes it. What cannot be published is tried again for a while; from its first failure on it counts as pending no
more, so that consumers on other hosts recompute at their deadline instead of waiting for a network that is gone.

vLLM may drop a feature from its encoder cache while it is queued here; from then on the queue is what keeps its memory,
which was given to nobody else (`epd_serve.stage_memory`): it is bounded. Features of one batch may be views of one
tensor, which lives as long as any of them: memory is counted by the tensor that is kept, once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from epd_serve import wire
from epd_serve.engine.ec.announcer import Announcer
from epd_serve.engine.ec.pusher import PUSH_BYTES, FeaturePusher, endpoint_of
from epd_serve.engine.ec.step import FeatureStep, remember
from epd_serve.engine.ec.store_access import open_store, store_report
from epd_serve.engine.vital_thread import end_stage
from epd_serve.trace import DeviceTrace, Trace
from epd_serve.wake import ON_TIME_NS, end_waits_late
from epd_serve.wiring import StageWiring
from npu_ops.fences import DeviceHungError
from npu_ops.memory import DeviceMemory
from npu_ops.torch_memory import HostMemory
from store.errors import StoreError, StoreFullError
from store.feature_pool import FeaturePool

logger = logging.getLogger(__name__)

MAX_QUEUED, _MAX_UNPUBLISHED = 256, 1024
STALL_S = 3.0  # of no progress at all; whoever waits for a feature has taken to recomputing by then
PUT_TIMEOUT_S = 30.0
_RETRY_S = 0.02
_OTHER_WRITER_S, _RETRY_TAKEN_S = 3.0, 0.005  # a fetch of the same feature ends at its own deadline, unless stopped
_RENEWED_WHILE_FULL_S = 3.0  # whoever waits for a feature that has no room longer than that may recompute it
_PUBLISH_AGAIN_S, _PUBLISH_GIVE_UP_S = 1.0, 30.0


@dataclass(eq=False)
class _Job:
    """A feature on its way.

    Attributes:
        feature: None where the store has it, as far as is known.
        written: waits until the device has written it.
        again: it is put anew, whatever the store says.
        nbytes: of what the arena has of it.
        due, give_up: when it is published (next), and when it is not tried again.
        failed: it could not be published so far.
    """

    key: str
    feature: torch.Tensor | None
    written: Callable[[], None]
    again: bool = False
    nbytes: int = 0
    due: float = 0.0
    give_up: float = 0.0
    failed: bool = False


class FeatureProducer:
    """One per encoder, in the worker of rank 0. Every rank computes the whole feature; one of them stores it.

    Args:
        memory: of the device that features lie on.
        pusher: writes features to other devices; by default where the wiring wants one.
        put_timeout_s: how long a feature waits for room in the arena.
        stall_s: how long the model's thread may wait for room in the queue while nothing gets stored.
    """

    def __init__(
        self,
        wiring: StageWiring,
        memory: DeviceMemory | None = None,
        pool: FeaturePool | None = None,
        pusher: FeaturePusher | None = None,
        *,
        put_timeout_s: float = PUT_TIMEOUT_S,
        stall_s: float = STALL_S,
    ) -> None:
        self._wiring, self._put_timeout_s, self._stall_s = wiring, put_timeout_s, stall_s
        self._memory = memory if memory is not None else HostMemory()
        self._pool = pool if pool is not None else open_store(wiring)
        self._publishes = self._pool.state != "none"
        self._trace = Trace(wiring.trace_path, wiring.instance)
        self._device_trace = DeviceTrace(self._trace, self._memory)
        self._cache: dict[str, torch.Tensor] = {}
        self._awaited: set[str] = set()  # needed, and neither encoded, loaded nor found in vLLM's cache yet
        self._again: set[str] = set()  # put anew, whatever the store says
        self._full_since: float | None = None
        self._closing = threading.Event()
        self._changed = threading.Condition()  # guards the following
        self._held: set[str] = set()
        self._told: set[str] = set()  # of these: announced, or as failed
        self._metadata: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._counters: Counter[str] = Counter()
        self._queued: list[_Job] = []  # the first one is in the writer's hands
        self._unpublished: dict[str, _Job] = {}
        self._progress = time.monotonic()  # when the writer was last done with a job, or began the first
        # Bound here: an encoder nobody hears must not start.
        self._announcer = Announcer(wiring, self._report, self._pending)
        if pusher is None and wiring.push:
            pusher = FeaturePusher(wiring, self._memory, endpoint_of(wiring, self._memory))
        self._pusher = pusher
        self._queue_bytes = wiring.feature_queue_bytes - (PUSH_BYTES if pusher is not None else 0)
        self._threads = [threading.Thread(target=self._write, name="epd-feature-writer", daemon=True)]
        if self._publishes:
            self._threads.append(threading.Thread(target=self._publish, name="epd-feature-publisher", daemon=True))
        for thread in self._threads:
            thread.start()
        self._announcer.start()

    # --- the model's thread -----------------------------------------------------------------------------------------

    def step(self, step: FeatureStep, cache: dict[str, torch.Tensor] | None = None) -> None:
        """Before the step runs: what vLLM's cache holds of the needed items will not be encoded again.

        Args:
            cache: vLLM's encoder cache; None where vLLM does not hand it over (it is known from the first save on).
        """
        self._cache = cache if cache is not None else self._cache
        with self._changed:
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
        """What is queued is put first, unless the store is full."""
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        if self._pusher is not None:
            self._pusher.close()
        for thread in self._threads:
            thread.join(timeout=5)
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
            self._announce(slot.key)

    def _settle(self, step: FeatureStep) -> None:
        """A request that was served without one of its items: whoever waits for that item is told now."""
        for key in self._awaited.intersection(step.ended):
            logger.error("feature %s was neither encoded nor in the encoder cache", key)
            self._announce(key)  # or as failed, if the store lacks it too
        self._awaited.intersection_update(step.held)

    def _put(self, key: str) -> None:
        again = key in self._again
        self._again.discard(key)
        feature, written = self._cache[key], self._memory.fence()
        if self._pusher is not None and (made := self._pusher.offer(key, feature, written)) is not None:
            self._announcer.announce(made)
        self._submit(_Job(key, feature, written, again))

    def _announce(self, key: str) -> None:
        """What the store has; as failed if it has not."""
        self._submit(_Job(key, None, lambda: None))

    def _submit(self, job: _Job) -> None:
        with self._changed:
            while not (taken := not self._closing.is_set() and self._has_room(job)):
                left_s = self._progress + self._stall_s - time.monotonic()
                if self._closing.is_set() or left_s <= 0:
                    break
                self._changed.wait(left_s)
            if taken:
                if not self._queued:
                    self._progress = time.monotonic()
                self._queued.append(job)
                self._changed.notify_all()
        if not taken:
            logger.warning("feature %s is dropped: nothing has left the full queue in time", job.key)
            self._tell(job.key, "put_dropped", reason="the encoder's queue to the store is full")

    def _has_room(self, job: _Job) -> bool:
        kept = dict(_kept_by(one.feature) for one in self._queued if one.feature is not None)
        if len(self._queued) >= MAX_QUEUED:
            return False
        if job.feature is None or not kept:
            return True
        address, nbytes = _kept_by(job.feature)
        return address in kept or sum(kept.values()) + nbytes <= self._queue_bytes

    # --- into the arena ---------------------------------------------------------------------------------------------

    def _write(self) -> None:
        end_waits_late(ON_TIME_NS)  # begun amid those of gloo (`worker_threads`)
        while self._next_queued():
            job = self._queued[0]
            try:
                self._memory.enter_thread()  # a stream of its own: copies do not queue behind the next step
                job.written()
                job.nbytes = self._stored(job.key) if job.feature is None else self._store(job, job.feature)
                self._tell(job.key, "put", job.nbytes)
            except DeviceHungError as error:  # nothing would leave this encoder any more
                end_stage(f"the device did not hand out feature {job.key}: {error}")
            except Exception as error:  # without its writer every save would hold up the model's thread
                logger.warning("feature %s: %s", job.key, error, exc_info=not isinstance(error, StoreError))
                self._tell_failed(job, error)
            self._full_since = None
            with self._changed:
                del self._queued[0]
                job.feature = None  # nothing here may keep its memory until the next one comes
                self._progress = time.monotonic()
                if job.nbytes and self._publishes:
                    self._to_publish(job)
                self._changed.notify_all()

    def _next_queued(self) -> bool:
        """False when it is closed and empty."""
        with self._changed:
            while not (self._queued or self._closing.is_set()):
                self._changed.wait(1.0)
            return bool(self._queued)

    def _tell_failed(self, job: _Job, error: Exception) -> None:
        try:
            self._tell(job.key, "put_failed", reason=str(error) or type(error).__name__)
        except Exception:  # whoever waits for it recomputes it at their deadline
            logger.exception("nobody is told that feature %s was not stored", job.key)

    def _stored(self, key: str) -> int:
        lease = self._pool.arena.lease(key, verify=False)
        if lease is None:
            raise StoreError("neither the encoder's cache nor the store has it")
        with lease:
            return lease.nbytes

    def _store(self, job: _Job, feature: torch.Tensor) -> int:
        # A row may be wider than the hidden size (DeepStack): everything is sized by the tensor itself.
        feature = feature.detach().contiguous()
        data = self._on_host(feature.view(torch.uint8).reshape(-1)).numpy()
        if job.again:
            self._forget(job.key)
        begun, arena = time.monotonic(), self._pool.arena
        shape, dtype = tuple(feature.shape), str(feature.dtype).removeprefix("torch.")
        while True:
            try:
                if arena.put(job.key, data, shape=shape, dtype=dtype) or arena.contains(job.key):
                    self._trace.stamp(job.key, "feature_put", nbytes=data.nbytes)
                    return int(data.nbytes)
                # Another process is writing it, and may fail.
                if time.monotonic() >= begun + _OTHER_WRITER_S or self._closing.wait(_RETRY_TAKEN_S):
                    raise StoreError("another process is writing it and does not finish")
            except StoreFullError:
                never = data.nbytes > arena.stats().capacity_bytes
                if never or time.monotonic() >= begun + self._put_timeout_s or self._closing.wait(_RETRY_S):
                    raise
                if self._full_since is None:
                    self._full_since = time.monotonic()
                    self._tell(job.key, "put_waited")

    def _on_host(self, data: torch.Tensor) -> torch.Tensor:
        if self._memory.host_visible:
            return data
        host = self._memory.host_buffer(data.numel())
        self._memory.download(host, data)
        return host

    def _forget(self, key: str) -> None:
        try:
            self._pool.remove(key)
        except StoreError as error:  # what cannot be reached cannot be removed; the put may still mend it
            logger.warning("feature %s is put over what the store has: %s", key, error)

    # --- into the second tier ---------------------------------------------------------------------------------------

    def _to_publish(self, job: _Job) -> None:
        if len(self._unpublished) >= _MAX_UNPUBLISHED:
            logger.warning("feature %s is not published: %d wait for the second tier", job.key, _MAX_UNPUBLISHED)
        elif job.key not in self._unpublished:
            job.due = time.monotonic()
            job.give_up = job.due + _PUBLISH_GIVE_UP_S
            self._unpublished[job.key] = job

    def _publish(self) -> None:
        end_waits_late(ON_TIME_NS)
        while (job := self._next_unpublished()) is not None:
            try:
                self._publish_one(job)
            except Exception:  # the thread goes on: the next feature may fare better
                logger.exception("feature %s is not in the second tier", job.key)
                job.give_up = 0.0
            with self._changed:
                if job.due >= job.give_up:
                    del self._unpublished[job.key]

    def _publish_one(self, job: _Job) -> None:
        try:
            there = self._pool.publish(job.key)  # or the arena has evicted it meanwhile
        except StoreError as error:
            logger.warning("feature %s is not in the second tier: %s", job.key, error)
            job.due, job.failed = time.monotonic() + _PUBLISH_AGAIN_S, True
            self._tell(job.key, "publish_failed")
        else:
            job.give_up = 0.0
            self._tell(job.key, "published" if there else "publish_failed", job.nbytes if there else 0, pooled=there)

    def _next_unpublished(self) -> _Job | None:
        with self._changed:
            while not self._closing.is_set():
                job = min(self._unpublished.values(), key=lambda one: one.due, default=None)
                wait_s = job.due - time.monotonic() if job is not None else 1.0
                if job is not None and wait_s <= 0:
                    return job
                self._changed.wait(wait_s)
        return None

    # --- what is said -----------------------------------------------------------------------------------------------

    def _tell(self, key: str, event: str, nbytes: int = 0, *, pooled: bool = False, reason: str = "") -> None:
        """A word about a key: counted as `event`, and announced where somebody waits for it."""
        with self._changed:
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
        """Keys that can be had soon, as long as that is worth waiting for."""
        full_since = self._full_since
        stuck = full_since is not None and time.monotonic() > full_since + _RENEWED_WHILE_FULL_S
        with self._changed:
            unpublished = [job.key for job in self._unpublished.values() if not job.failed]
            queued = [] if stuck else [job.key for job in self._queued]
            return list(dict.fromkeys((*(self._held - self._told), *queued, *unpublished)))

    def _report(self) -> wire.StoreReport:
        with self._changed:
            encoding, counters = len(self._held - self._told), dict(self._counters)
            waiting_puts = len(self._queued) if self._full_since is not None else 0
        return store_report(self._wiring, self._pool, counters, waiting_puts=waiting_puts, encoding=encoding)


def _kept_by(feature: torch.Tensor) -> tuple[int, int]:
    """Address and size of the memory that a tensor keeps; one without such memory is the writer's to refuse."""
    if feature.layout is not torch.strided:
        return id(feature), 0
    storage = feature.untyped_storage()
    return storage.data_ptr(), storage.nbytes()
