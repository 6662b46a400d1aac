"""Worker side of an encoder: features leave through a writer thread that puts first and announces after.

The model step only hands the tensor over (on a device: records an event; the writer waits for it), so encoding the
next item overlaps with storing this one (EPD-Serve §3.2). An item that vLLM finds in its own encoder cache is not
encoded again and `save_caches` never fires for it: those are re-announced, and put again if the store has lost them.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable

import torch
import zmq

from epd_serve import wire
from epd_serve.engine.sockets import open_socket
from epd_serve.trace import Trace
from epd_serve.wiring import StageWiring
from npu_ops.fences import fence
from store.arena import Arena
from store.errors import StoreError

logger = logging.getLogger(__name__)

_MAX_QUEUED = 256

_Job = tuple[str, torch.Tensor, Callable[[], None]]  # key, feature, wait until the device has written it


def _job(key: str, feature: torch.Tensor) -> _Job:
    return key, feature, fence(feature.device)


class FeatureProducer:
    """Owns the writer thread and the publisher socket of one encode worker."""

    def __init__(self, wiring: StageWiring) -> None:
        self._wiring = wiring
        self._arena = Arena.attach(wiring.arena)
        self._trace = Trace(wiring.trace_path, wiring.instance)
        self._cache: dict[str, torch.Tensor] = {}
        self._queue: queue.Queue[_Job | None] = queue.Queue(maxsize=_MAX_QUEUED)
        self._publisher = open_socket(zmq.PUB, linger_s=0.2)  # bound here: an encoder nobody hears must not start
        self._publisher.bind(wiring.publish)
        self._thread = threading.Thread(target=self._write, name="epd-feature-writer", daemon=True)
        self._thread.start()

    def save(self, cache: dict[str, torch.Tensor], key: str) -> None:
        """A feature was encoded in this step. Returns at once; blocks only when `_MAX_QUEUED` puts are behind."""
        self._cache = cache  # vLLM's encoder cache: one dict for the life of the worker
        self._trace.stamp(key, "encoded")
        self._queue.put(_job(key, cache[key]))

    def announce_again(self, keys: Iterable[str]) -> None:
        """Called before the step runs: what vLLM's cache already holds of these will not be encoded again."""
        for key in keys:
            self._trace.stamp(key, "encode_start")
            if key in self._cache:
                self._queue.put(_job(key, self._cache[key]))

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(timeout=5)
        self._arena.close()

    def _write(self) -> None:
        publisher = self._publisher
        while (job := self._queue.get()) is not None:
            key, feature, written = job
            try:
                written()
                event = self._put(key, feature)
            except Exception as error:  # one bad feature must not end the writer: `save` would block for ever
                logger.exception("feature %s was not stored", key)
                event = wire.FeatureFailed(key, str(error))
            publisher.send(wire.encode(event))
        publisher.close()

    def _put(self, key: str, feature: torch.Tensor) -> wire.Announcement:
        # A row may be wider than the hidden size (DeepStack): everything is sized by the tensor itself.
        host = feature.detach().to("cpu").contiguous()
        data = host.view(torch.uint8).reshape(-1).numpy()
        try:
            self._arena.put(key, data, shape=tuple(feature.shape), dtype=str(feature.dtype).removeprefix("torch."))
        except StoreError as error:
            logger.warning("feature %s was not stored: %s", key, error)
            return wire.FeatureFailed(key, str(error))
        self._trace.stamp(key, "feature_put", nbytes=data.nbytes)
        return wire.FeatureReady(key, data.nbytes, self._wiring.incarnation)
