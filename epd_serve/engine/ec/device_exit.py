"""E's half of the device path: opens the outbox when the second tier is there, and hears which consumers reach it.

One thread does both. It begins without waiting for the tier: until the outbox is open, and for what it cannot take,
features go through the arena. The object that consumers probe is put again every few seconds, because a tier that was
full or whose master restarted has lost it, and a consumer that starts then would not find it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping

import torch

from epd_serve import wire
from epd_serve.engine.ec.device_outbox import DeviceOutbox
from epd_serve.engine.ec.device_probe import ArenaNeed
from epd_serve.engine.ec.device_tier import MooncakeTier, object_name
from epd_serve.engine.ec.subscription import Subscription
from epd_serve.peers import Peers
from epd_serve.wiring import StageWiring
from npu_ops.memory import DeviceMemory, DeviceMemoryError
from store.errors import StoreError
from store.mooncake.tier import MooncakeStore

logger = logging.getLogger(__name__)

_OFFER_AGAIN_S = 5.0
_LISTEN_S = 0.5
_OPENING_S = 0.05


class DeviceExit:
    """A `DirectExit` into the second tier. Owns `tier`, which may still be connecting.

    Args:
        changed: called when `path` has.
    """

    def __init__(
        self, wiring: StageWiring, memory: DeviceMemory, tier: MooncakeStore, changed: Callable[[], None]
    ) -> None:
        self._wiring, self._memory, self._tier, self._changed = wiring, memory, tier, changed
        self._need = ArenaNeed(wiring.incarnation)
        self._outbox: DeviceOutbox | None = None
        self._offered_at = 0.0
        self._refused = False
        self._lock = threading.Lock()  # guards the counters
        self._counters: Counter[str] = Counter()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="epd-device-exit", daemon=True)
        self._thread.start()

    @property
    def path(self) -> str:
        return "device" if self._offered_at else "host"

    @property
    def arena_needed(self) -> bool:
        return self._need.needed

    def put(self, key: str, feature: torch.Tensor, written: Callable[[], None], *, again: bool) -> bool:
        if self._outbox is None or not self._offered_at:
            return False
        try:
            if again:
                self._tier.remove(object_name(key))
            self._outbox.put(key, feature, written)
        except (StoreError, DeviceMemoryError) as error:
            logger.warning("feature %s goes through the arena: %s", key, error)
            self._count("device.put_failed")
            return False
        self._count("device.put")
        return True

    def counters(self) -> Mapping[str, int]:
        with self._lock:
            return dict(self._counters)

    def close(self) -> None:
        self._closing.set()
        self._thread.join(timeout=5)
        self._tier.close()

    def _run(self) -> None:
        self._memory.enter_thread()
        ear, peers = Subscription(self._wiring.key_file), Peers(self._wiring)
        while not self._closing.is_set():
            if peers.changed():  # at first before the probe is there to be answered
                takers = peers.takers_of_features()
                ear.follow(takers.values())
                self._need.expect(takers)
            try:
                self._offer()
            except (StoreError, DeviceMemoryError) as error:
                how_long = "here" if self._refused else "for now"
                logger.warning("features do not leave from device memory %s: %s", how_long, error)
                self._closing.wait(_LISTEN_S)
            except Exception:  # the arena is there
                logger.exception("features do not leave from device memory here")
                self._refused = True
            opening = not self._offered_at and not self._refused
            for message in ear.at_hand(_OPENING_S if opening else _LISTEN_S):
                if isinstance(message, wire.FeaturePath):
                    self._need.hear(message.instance, message.encoder, message.path)
        ear.close()

    def _offer(self) -> None:
        now = time.monotonic()
        if self._refused or self._tier.state != "up" or (self._offered_at and now < self._offered_at + _OFFER_AGAIN_S):
            return
        if self._outbox is None:
            self._refused = True  # unless it opens: a slab that is refused once would be again
            self._outbox = DeviceOutbox(
                self._memory,
                MooncakeTier(self._tier),
                slab_bytes=self._wiring.feature_slab_bytes,
                incarnation=self._wiring.incarnation,
            )
            self._refused = False
        self._outbox.offer_probe()
        first, self._offered_at = not self._offered_at, now
        if first:
            logger.info("features leave from device memory, verified by %s", self._outbox.integrity.method)
            self._changed()

    def _count(self, event: str) -> None:
        with self._lock:
            self._counters[event] += 1
