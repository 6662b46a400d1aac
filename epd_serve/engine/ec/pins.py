"""Pins of a consumer: leases that any thread may let go of, and that one thread gives back to the store."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

from store.errors import StoreError
from store.lease import Lease

logger = logging.getLogger(__name__)


class Pins:
    """Owns the leases that were let go of and are not back yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._dropped: list[Lease] = []

    @property
    def dropped(self) -> bool:
        return bool(self._dropped)

    def drop(self, lease: Lease) -> None:
        with self._lock:
            self._dropped.append(lease)

    def give_back(self) -> int:
        """Releases what was dropped; takes the store's lock. How many went back."""
        with self._lock:
            leases, self._dropped = self._dropped, []
        kept = []
        for lease in leases:
            try:
                lease.release()
            except StoreError as error:  # the store did not answer: tried again with the next ones
                logger.warning("a feature stays pinned for now: %s", error)
                kept.append(lease)
        with self._lock:
            self._dropped += kept
        return len(leases) - len(kept)


@dataclass(frozen=True)
class Pin:
    """A verified, leased feature (`feature_item.Pin`)."""

    lease: Lease
    pins: Pins

    @property
    def nbytes(self) -> int:
        return self.lease.nbytes

    def release(self) -> None:
        self.pins.drop(self.lease)
