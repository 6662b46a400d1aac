"""Features straight into device memory where their encoder is reached that way, through the arena where not.

Which way, is decided per life of an encoder (`device_probe.py`): tried when its first report is heard, and told to it,
so that it knows whether anybody needs its features in the arena. A fetch that fails on the direct way is looked for on
the other before that counts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence

from epd_serve import wire
from epd_serve.engine.ec.device_probe import Path
from epd_serve.engine.ec.device_source import DeviceSource
from epd_serve.engine.ec.feature_source import Held, HostSource
from epd_serve.wiring import StageWiring
from store.errors import StoreError
from store.feature_pool import FeaturePool, PoolState

logger = logging.getLogger(__name__)

_MAX_REMEMBERED = 8192
_SAY_AGAIN_S = 2.0  # announcements may be lost, and an encoder that did not hear copies everything to its host


class DirectSource:
    """A `FeatureSource` of both ways. Owns both.

    Args:
        endpoints: of the feature agents, by rank.
        announce: from any thread.
    """

    def __init__(
        self,
        wiring: StageWiring,
        pool: FeaturePool,
        endpoints: Sequence[str],
        announce: Callable[[wire.FeaturePath], None],
    ) -> None:
        self._wiring, self._announce = wiring, announce
        self._host = HostSource(pool)
        self._lock = threading.Lock()  # guards the following
        self._heard: OrderedDict[str, tuple[str, int]] = OrderedDict()  # key → its encoder's life, bytes
        self._lives: dict[str, str] = {}  # encoder → its present life
        self._paths: dict[str, tuple[wire.FeaturePath, float]] = {}  # life → what was said of it, when last
        self._counters: Counter[str] = Counter()
        self._device = DeviceSource(
            endpoints, incarnation=wiring.incarnation, wait_s=wiring.feature_wait_s, on_path=self._decided
        )

    @property
    def state(self) -> PoolState:
        return self._host.state

    @property
    def capacity_bytes(self) -> int:
        return min(self._host.capacity_bytes, self._wiring.feature_slab_bytes)

    def hear(self, event: wire.FeatureReady | wire.StoreReport) -> None:
        if isinstance(event, wire.FeatureReady):
            with self._lock:
                self._heard[event.key] = event.incarnation, event.nbytes
                self._heard.move_to_end(event.key)
                if len(self._heard) > _MAX_REMEMBERED:
                    self._heard.popitem(last=False)
        elif event.feature_path == "device":
            self._meet(event.instance, event.incarnation)

    def reaches(self, event: wire.FeatureReady) -> bool:
        return event.host != wire.NO_ARENA or self._is_direct(event.incarnation)

    def lease_local(self, key: str) -> Held | None:
        pin = self._device.lease_local(key)
        return pin if pin is not None else self._host.lease_local(key)

    def fetch(self, key: str) -> Held | None:
        direct, nbytes = self._comes_directly(key)
        if not direct:
            return self._host.fetch(key)
        try:
            pin = self._device.fetch(key, nbytes)
        except StoreError as error:
            self._count("device.fetch_failed")
            held = self._through_the_host(key)
            if held is None:
                raise
            logger.warning("%s; it came through the arena", error)
            return held
        self._count("device.fetched" if pin is not None else "device.fetch_missing")
        return pin if pin is not None else self._host.fetch(key)

    def counters(self) -> Mapping[str, int]:
        with self._lock:
            return {**self._host.counters(), **self._counters}

    def close(self) -> None:
        self._device.close()
        self._host.close()

    def _comes_directly(self, key: str) -> tuple[bool, int]:
        """Whether to fetch it past the host, and its bytes (0: unknown). Unknown encoder: if all are reached so."""
        with self._lock:
            maker, nbytes = self._heard.get(key, ("", 0))
            lives = [maker] if maker else list(self._lives.values())
        return bool(lives) and all(map(self._is_direct, lives)), nbytes

    def _is_direct(self, life: str) -> bool:
        return self._device.features.path(life) is Path.DEVICE

    def _through_the_host(self, key: str) -> Held | None:
        try:
            return self._host.fetch(key)
        except StoreError as error:
            logger.warning("feature %s is not to be had through the arena either: %s", key, error)
            return None

    def _meet(self, instance: str, life: str) -> None:
        now = time.monotonic()
        with self._lock:
            before, self._lives[instance] = self._lives.get(instance), life
            if before is not None and before != life:
                self._paths.pop(before, None)
            message, said = self._paths.get(life, (None, now))
            again = message if now >= said + _SAY_AGAIN_S else None
            if again is not None:
                self._paths[life] = again, now
        if again is not None:
            self._announce(again)
        elif message is None:
            self._device.features.meet(life)

    def _decided(self, life: str, path: Path, reason: str) -> None:
        message = wire.FeaturePath(self._wiring.instance, life, path.value, reason)
        with self._lock:
            self._paths[life] = message, time.monotonic()
            self._counters[f"path.{path.value}"] += 1
        self._announce(message)

    def _count(self, event: str) -> None:
        with self._lock:
            self._counters[event] += 1
