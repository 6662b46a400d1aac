"""Pins of a consumer: features that any thread may let go of, and that one thread gives back to the store."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

from store.arena.lease import Lease
from store.errors import StoreError

logger = logging.getLogger(__name__)


class Pins:
    """Owns what was let go of and is not back yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._dropped: list[Lease] = []

    @property
    def dropped(self) -> bool:
        return bool(self._dropped)

    def drop(self, held: Lease) -> None:
        with self._lock:
            self._dropped.append(held)

    def give_back(self) -> int:
        """Releases what was dropped; takes the store's lock. How many went back."""
        with self._lock:
            dropped, self._dropped = self._dropped, []
        kept = []
        for held in dropped:
            try:
                held.release()
            except StoreError as error:  # the store did not answer: tried again with the next ones
                logger.warning("a feature stays pinned for now: %s", error)
                kept.append(held)
        with self._lock:
            self._dropped += kept
        return len(dropped) - len(kept)


@dataclass(frozen=True)
class Pin:
    """A verified feature that is held (`feature_item.Pin`)."""

    held: Lease
    pins: Pins

    @property
    def nbytes(self) -> int:
        return self.held.nbytes

    def release(self) -> None:
        self.pins.drop(self.held)
