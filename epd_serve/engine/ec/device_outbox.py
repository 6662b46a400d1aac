"""E's side of the device path: a feature leaves from the encoder's device memory, without the host in between.

    feature --copy on the device--> slab | trailer --one zero-copy put--> second tier

Called by the writer thread (or several). The slab only holds features on their way; a full one makes callers wait, up
to a bound. Writes are one-sided reads of our memory by the transport, so the put begins only behind a fence, and a
place whose put is late stays taken until that put has ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from epd_serve.engine.ec.device_slab import DeviceSlab, Place, SlabBook
from epd_serve.engine.ec.device_tier import PROBE_BYTES, DeviceTier, object_name, probe_key
from epd_serve.engine.ec.device_trailer import TRAILER_BYTES, FeatureShape, Integrity
from npu_ops.memory import DeviceMemory
from store.errors import StoreFullError


class DeviceOutbox:
    """Puts features from device memory. Thread-safe.

    Owned by `device_exit.py`. When `put` returns, consumers that are reached this way can fetch the feature.

    Args:
        slab_bytes: room for features on their way; a feature larger than that is refused.
        incarnation: of this encoder.
        wait_s: how long a put waits for room in the slab.

    Raises:
        StoreError: the tier did not register the slab.
        DeviceMemoryError: the device has no room for the slab.
    """

    def __init__(
        self, memory: DeviceMemory, tier: DeviceTier, *, slab_bytes: int, incarnation: str, wait_s: float = 2.0
    ) -> None:
        memory.enter_thread()
        self._memory = memory
        self._tier = tier
        self._incarnation = incarnation
        self._wait_s = wait_s
        self._slab = DeviceSlab(memory, tier, slab_bytes)
        self._book = SlabBook(self._slab.nbytes)
        self._room = threading.Condition()  # guards _book
        self.integrity = Integrity(memory)
        self._probe = memory.allocate(PROBE_BYTES, 64)
        memory.copy(self._probe.data, torch.arange(PROBE_BYTES, dtype=torch.int32).to(torch.uint8))
        memory.fence()()

    def offer_probe(self) -> None:
        """Puts the object by which consumers try whether they reach this encoder. Raises as `put`."""
        self.put(probe_key(self._incarnation), self._probe.data, lambda: None)

    def put(self, key: str, feature: torch.Tensor, written: Callable[[], None]) -> int:
        """Puts a feature; its size in bytes. It may be overwritten when this returns.

        Args:
            written: waits until the device has written the feature (`memory.fence()` of the thread that computes).

        Raises:
            StoreFullError: the slab or the tier has no room. StoreError: the tier did not answer, or refused.
        """
        self._memory.enter_thread()
        written()
        flat = feature.detach().contiguous().view(torch.uint8).reshape(-1)
        place = self._reserve(key, flat.numel() + TRAILER_BYTES)
        handed_over = False
        try:
            object_ = self._slab.view(place.offset, place.nbytes)
            self._memory.copy(object_[: flat.numel()], flat)
            self.integrity.seal(key, object_, FeatureShape.of(feature), self._incarnation)
            self._memory.fence()()
            handed_over = True
            self._tier.put_from(
                object_name(key), self._slab.address(place.offset), place.nbytes, lambda: self._settled(place)
            )
        finally:
            if not handed_over:
                self._settled(place)
        return flat.numel()

    def waiting_bytes(self) -> int:
        """Bytes on their way, late ones included."""
        with self._room:
            return self._book.pinned_bytes

    def _reserve(self, key: str, nbytes: int) -> Place:
        deadline = time.monotonic() + self._wait_s
        with self._room:
            while (place := self._book.reserve(nbytes)) is None:
                left = deadline - time.monotonic()
                if nbytes > self._slab.nbytes or left <= 0:
                    raise StoreFullError(
                        f"feature {key}: no {nbytes} bytes in the device slab of {self._slab.nbytes}, "
                        f"{self._book.pinned_bytes} on their way"
                    )
                self._room.wait(left)
        return place

    def _settled(self, place: Place) -> None:
        with self._room:
            self._book.unpin(place)
            self._room.notify_all()
