"""How a feature becomes a value of a Mooncake Store and back. Blocks: `store.mooncake.tier` calls it under its guard.

A put is read back before it counts: Mooncake's put also says 0, and stores nothing, where the value of a dead owner or
of an unfinished writer lies. Payload and record travel as two parts of one transfer, so that neither is copied.
"""

from __future__ import annotations

import mmap
import threading
import time

import numpy as np

from store.checksum import Bytes
from store.errors import CorruptFeatureError, StoreFullError
from store.feature import RECORD_BYTES, FeatureMeta, decoded, encoded
from store.mooncake.client import MooncakeClient, Outcome

_FULL_RETRIES, _FULL_NAP_S = 10, 0.02  # the master evicts in the background, a moment after it refused
_UNFINISHED_NAP_S = 0.005
_RETRY_NAP_S = 0.1


class Scratch:
    """A record's place in registered memory for every thread that transfers, so a stuck one keeps its own."""

    def __init__(self, threads: int) -> None:
        self.memory: Bytes = np.frombuffer(mmap.mmap(-1, threads * RECORD_BYTES), dtype=np.uint8)
        self._lock = threading.Lock()
        self._taken = 0
        self._own = threading.local()

    def mine(self) -> Bytes:
        """The calling thread's `RECORD_BYTES`."""
        place: Bytes | None = getattr(self._own, "place", None)
        if place is None:
            with self._lock:
                start = self._taken * RECORD_BYTES
                self._taken += 1
            place = self.memory[start : start + RECORD_BYTES]
            assert place.nbytes == RECORD_BYTES, "one place per thread of the guard"
            self._own.place = place
        return place


def store_value(
    client: MooncakeClient, name: str, meta: FeatureMeta, address: int, scratch: Scratch, patience_s: float
) -> Outcome:
    """Puts the payload at `address` under `name`. `DONE`: a value of this feature can be read back, ours or another's.

    `UNFINISHED`: another writer of the name has not finished within `patience_s`. `LOST`: it went to memory whose owner
    is gone, and the master does not know yet.

    Raises:
        StoreFullError: no room.
        StoreUnavailableError: the master does not answer.
    """
    record = scratch.mine()
    parts = [(address, meta.nbytes), (record.ctypes.data, RECORD_BYTES)]
    deadline = time.monotonic() + patience_s
    full = 0
    while True:
        record[:] = np.frombuffer(encoded(meta), dtype=np.uint8)
        put = client.put(name, parts)
        if put is Outcome.FULL:
            full += 1
            if full > _FULL_RETRIES:
                raise StoreFullError(f"{meta.key}: no room for {meta.nbytes} bytes in the second tier")
            time.sleep(_FULL_NAP_S)
            continue
        read = _read_back(client, name, meta, record)
        while read is Outcome.UNFINISHED and time.monotonic() < deadline:
            time.sleep(_UNFINISHED_NAP_S)
            read = _read_back(client, name, meta, record)
        if read in (Outcome.DONE, Outcome.UNFINISHED):
            return read
        if time.monotonic() > deadline:
            return Outcome.LOST
        client.remove(name)  # of an owner that is gone, or not what it should be
        if put is not Outcome.DONE:
            time.sleep(_RETRY_NAP_S)  # its memory is still offered by the master


def load_value(
    client: MooncakeClient, name: str, key: str, address: int, nbytes: int, scratch: Scratch
) -> FeatureMeta | None:
    """Reads the payload, `nbytes` long, to `address`; None when there is none or its bytes are lost.

    A value whose owner is gone is removed, so that it is missing for all and can be put anew.

    Raises:
        CorruptFeatureError: the record does not fit.
        StoreUnavailableError: the master does not answer.
    """
    record = scratch.mine()
    outcome = client.get(name, [(address, nbytes), (record.ctypes.data, RECORD_BYTES)])
    if outcome is Outcome.LOST:
        client.remove(name)
    if outcome is not Outcome.DONE:
        return None
    return decoded(record.tobytes(), key, nbytes)


def _read_back(client: MooncakeClient, name: str, meta: FeatureMeta, record: Bytes) -> Outcome:
    """`DONE` when a value of this feature is there and its owner answers. Reads the record only."""
    record[:] = 0
    outcome = client.get_range(name, meta.nbytes, (record.ctypes.data, RECORD_BYTES))
    if outcome is Outcome.DONE:
        try:
            decoded(record.tobytes(), meta.key, meta.nbytes)
        except CorruptFeatureError:
            return Outcome.LOST
    return outcome
