"""The writer of an encoder: puts features where consumers can get them and says so afterwards, never before.

The arena comes first, because consumers of the same host need no more; then the second tier, in a thread of its own
(`publishing.py`). A full store is back-pressure: the writer waits for room, what is behind it waits too, and
the model's thread where the queue is full (`write_queue.py`). None waits for good: a feature that finds no room in time
is announced as failed, and whoever needs it recomputes it.
"""

from __future__ import annotations

import logging
import threading
import time

import torch

from epd_serve.engine.ec.publishing import SecondTierPublisher, Tell
from epd_serve.engine.ec.write_queue import Job, WriteQueue
from epd_serve.engine.vital_thread import end_stage
from epd_serve.trace import Trace
from npu_ops.fences import DeviceHungError
from npu_ops.memory import DeviceMemory
from npu_ops.torch_memory import HostMemory
from store.errors import StoreError, StoreFullError
from store.feature_pool import FeaturePool

logger = logging.getLogger(__name__)

PUT_TIMEOUT_S = 30.0
_RETRY_S = 0.02
_OTHER_WRITER_S, _RETRY_TAKEN_S = 3.0, 0.005  # a fetch of the same feature ends at its own deadline, unless stopped
_RENEWED_WHILE_FULL_S = 3.0  # whoever waits for a feature that has no room longer than that may recompute it


class FeatureWriter:
    """Owns the writer thread and the publisher of the second tier.

    Args:
        queue: from the model's thread.
        memory: of the device that features lie on.
    """

    def __init__(
        self,
        pool: FeaturePool,
        tell: Tell,
        trace: Trace,
        queue: WriteQueue,
        *,
        memory: DeviceMemory | None = None,
        put_timeout_s: float = PUT_TIMEOUT_S,
    ) -> None:
        self._pool, self._tell, self._trace = pool, tell, trace
        self._memory = memory if memory is not None else HostMemory()
        self._put_timeout_s = put_timeout_s
        self._queue = queue
        self._full_since: float | None = None
        self._closing = threading.Event()
        self._second_tier = SecondTierPublisher(pool.publish, tell) if pool.state != "none" else None
        self._thread = threading.Thread(target=self._write, name="epd-feature-writer", daemon=True)
        self._thread.start()

    @property
    def waiting_puts(self) -> int:
        """Features that wait for room."""
        return len(self._queue.keys()) if self._full_since is not None else 0

    def pending(self) -> list[str]:
        """Keys on their way into the store, as long as that is worth waiting for."""
        full_since = self._full_since
        stuck = full_since is not None and time.monotonic() > full_since + _RENEWED_WHILE_FULL_S
        return ([] if stuck else self._queue.keys()) + (
            self._second_tier.pending() if self._second_tier is not None else []
        )

    def put(self, key: str, feature: torch.Tensor, *, again: bool = False) -> None:
        """Store this and announce it. `again`: even if the store says that it has it."""
        self._submit(Job(key, feature, self._memory.fence(), again))

    def announce(self, key: str) -> None:
        """Announce what the store has; as failed if it has not."""
        self._submit(Job(key, None, lambda: None))

    def close(self) -> None:
        """What is queued is put first, unless the store is full."""
        self._closing.set()
        self._queue.close()
        self._thread.join(timeout=5)
        if self._second_tier is not None:
            self._second_tier.close()

    def _submit(self, job: Job) -> None:
        if not self._queue.put(job):
            logger.warning("feature %s is dropped: nothing has left the full queue in time", job.key)
            self._tell(job.key, "put_dropped", reason="the encoder's queue to the store is full")

    def _write(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                self._memory.enter_thread()  # a stream of its own: copies do not queue behind the next step
                self._leave(job)
            except StoreError as error:
                logger.warning("feature %s was not stored: %s", job.key, error)
                self._tell_failed(job.key, error)
            except DeviceHungError as error:  # nothing would leave this encoder any more
                end_stage(f"the device did not hand out feature {job.key}: {error}")
            except Exception as error:  # without its writer every save would hold up the model's thread
                logger.exception("feature %s was not stored", job.key)
                self._tell_failed(job.key, error)
            finally:
                self._full_since = None
                self._queue.done(job)
            del job  # its feature counts no longer, and nothing here may keep the memory until the next one comes

    def _leave(self, job: Job) -> None:
        job.written()
        nbytes = self._store(job) if job.feature is not None else self._stored(job.key)
        self._tell(job.key, "put", nbytes)
        if self._second_tier is not None:
            self._second_tier.submit(job.key, nbytes)

    def _tell_failed(self, key: str, error: Exception) -> None:
        try:
            self._tell(key, "put_failed", reason=str(error) or type(error).__name__)
        except Exception:  # whoever waits for it recomputes it at their deadline
            logger.exception("nobody is told that feature %s was not stored", key)

    def _stored(self, key: str) -> int:
        lease = self._pool.arena.lease(key, verify=False)
        if lease is None:
            raise StoreError("neither the encoder's cache nor the store has it")
        with lease:
            return lease.nbytes

    def _store(self, job: Job) -> int:
        # A row may be wider than the hidden size (DeepStack): everything is sized by the tensor itself.
        assert job.feature is not None
        feature = job.feature.detach().contiguous()
        data = self._on_host(feature.view(torch.uint8).reshape(-1)).numpy()
        if job.again:
            self._forget(job.key)
        begun = time.monotonic()
        deadline = begun + self._put_timeout_s
        while True:
            try:
                stored = self._pool.arena.put(
                    job.key, data, shape=tuple(feature.shape), dtype=str(feature.dtype).removeprefix("torch.")
                )
                if not stored and not self._pool.arena.contains(job.key):  # another process is writing it, and may fail
                    if time.monotonic() >= begun + _OTHER_WRITER_S or self._closing.wait(_RETRY_TAKEN_S):
                        raise StoreError("another process is writing it and does not finish")
                    continue
            except StoreFullError:
                never = data.nbytes > self._pool.arena.stats().capacity_bytes
                if never or time.monotonic() >= deadline or self._closing.wait(_RETRY_S):
                    raise
                if self._full_since is None:
                    self._full_since = time.monotonic()
                    self._tell(job.key, "put_waited")
            else:
                self._trace.stamp(job.key, "feature_put", nbytes=data.nbytes)
                return int(data.nbytes)

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
