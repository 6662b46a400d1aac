"""The device path with the manners of `FeaturePool.fetch`: blocks, returns a pin or None, raises the store's errors.

For a consumer that fetches in threads of its own (`Fetcher(fetch=…)`): `DeviceSource.fetch` in place of `pool.fetch`
for features whose encoder is reached by the device path. The pin is a `DevicePin` instead of a lease of the arena.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from epd_serve.engine.ec.device_features import DeviceFeatures
from epd_serve.engine.ec.device_ledger import DevicePin, Failed
from epd_serve.engine.ec.device_probe import Path
from store.errors import CorruptFeatureError, StoreError, StoreFullError, StoreUnavailableError

_MARGIN_S = 5.0
"""On top of a fetch's own deadline, after which it has been answered unless this process is broken."""

_Outcome = Future["DevicePin | Failed"]


class DeviceSource:
    """Owns a `DeviceFeatures`. Thread-safe. Arguments: see there."""

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        incarnation: str,
        wait_s: float,
        on_path: Callable[[str, Path, str], None],
    ) -> None:
        self._wait_s = wait_s
        self._lock = threading.Lock()
        self._waiters: dict[str, deque[_Outcome]] = {}
        self.features = DeviceFeatures(
            endpoints,
            incarnation=incarnation,
            wait_s=wait_s,
            on_pinned=self._pinned,
            on_failed=self._failed,
            on_path=on_path,
        )

    def lease_local(self, key: str) -> DevicePin | None:
        """A pin of a feature that all workers have. Never blocks."""
        return self.features.try_local(key)

    def fetch(self, key: str, nbytes: int = 0) -> DevicePin | None:
        """Second tier → the slabs of all workers, verified and pinned; None when the tier does not have it.

        Raises:
            CorruptFeatureError: what came is not the feature.
            StoreFullError: pinned features leave no room in the slabs.
            StoreUnavailableError: a worker or the tier did not answer in time.
        """
        outcome: _Outcome = Future()
        with self._lock:
            self._waiters.setdefault(key, deque()).append(outcome)
        self.features.fetch(key, nbytes)
        try:
            result = outcome.result(self._wait_s + _MARGIN_S)
        except TimeoutError as error:
            self._leave(key, outcome)
            raise StoreUnavailableError(f"feature {key}: its fetch was not answered") from error
        if isinstance(result, DevicePin):
            return result
        if result.cause == "missing":
            return None
        raise _error(result)

    def close(self) -> None:
        self.features.close()
        with self._lock:
            waiting = [outcome for outcomes in self._waiters.values() for outcome in outcomes]
            self._waiters.clear()
        for outcome in waiting:
            outcome.set_result(Failed("", "unavailable", "closing"))

    def _pinned(self, pin: DevicePin) -> None:
        with self._lock:
            waiters = self._waiters.pop(pin.key, deque())
        for outcome in waiters:  # one attempt may end the wait of several: each gets a pin of its own
            more = self.features.try_local(pin.key)
            assert more is not None, "it is pinned here"
            outcome.set_result(more)
        pin.release()

    def _failed(self, key: str, cause: str, reason: str) -> None:
        with self._lock:
            waiters = self._waiters.pop(key, deque())
        for outcome in waiters:
            outcome.set_result(Failed(key, cause, reason))

    def _leave(self, key: str, outcome: _Outcome) -> None:
        with self._lock:
            waiters = self._waiters.get(key)
            if waiters is not None and outcome in waiters:
                waiters.remove(outcome)
                return
        late = outcome.result(_MARGIN_S)  # it is being answered in this very moment
        if isinstance(late, DevicePin):
            late.release()


def _error(failed: Failed) -> StoreError:
    message = f"feature {failed.key}: {failed.reason}"
    if failed.cause == "corrupt":
        return CorruptFeatureError(message)
    if failed.cause == "full":
        return StoreFullError(message)
    return StoreUnavailableError(message)
