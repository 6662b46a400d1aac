"""Tier 2 of the MM Store: a Mooncake Store, which joins hosts.

Owns what a value is, what a transfer may touch for how long, and this process's connection: begun in the background,
given up when calls hang (`store.mooncake.breaker`), regained by itself. What Mooncake is told: `store.mooncake.client`.

A value is a feature's payload and then its record. A put is read back before it counts: Mooncake's put also says 0, and
stores nothing, where the value of a dead owner or of an unfinished writer lies.

`python -m store.mooncake.tier HOST:PORT` removes values, leased or not; their keys come by stdin. A process of its own,
because whoever asks (the command line) loads no Mooncake and can end this one when it hangs.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Self, TypeAlias, TypeVar

import numpy as np

from store.errors import CorruptFeatureError, StoreError, StoreFullError, StoreUnavailableError
from store.feature import RECORD_BYTES, Bytes, FeatureMeta, checked_key, decoded, encoded
from store.mooncake.breaker import Guard
from store.mooncake.client import MooncakeClient, MooncakeConfig, Outcome, Part, load_mooncake

log = logging.getLogger(__name__)
T = TypeVar("T")
Call: TypeAlias = Callable[[MooncakeClient, str], T]
"""What asks a Mooncake Store something about the value of this name."""

_PUT_NAP_S = 0.02
_FULL_RETRIES = 10  # the master evicts in the background, a moment after it refused
_LEAVE_S = 30.0


class MooncakeStore:
    """The transfers that `store.feature_pool` is made of. Thread-safe.

    Features are moved where they lie, or copied from and to memory of the device (`MooncakeConfig.host_memory`). Their
    memory must not be reused before transfers end, which may be long after they have raised: `on_failure` says when.
    Until it is connected every call raises StoreUnavailableError.

    Attributes:
        guard: its breaker. client: None until it has connected for the first time, and after `close`.
    """

    def __init__(self, config: MooncakeConfig, memory: Bytes | None = None) -> None:
        """Begins to connect, in the background.

        Args:
            memory: where `put_from` and `fetch_into` find features and put them; it stays mapped until `close` has
                returned.

        Raises:
            StoreError: Mooncake is not installed.
        """
        load_mooncake(config.host)
        self.config = config
        self.client: MooncakeClient | None = None
        self._staged = config.host_memory is not None
        self._own = threading.local()  # `place`: registered memory of the thread that transfers; a stuck one keeps it
        self._in_place = [memory] if memory is not None and not self._staged else []
        self._suspect = ""  # read by the probe: the value whose transfer failed last
        self._probing: Bytes  # where to
        self.guard = Guard(
            f"Mooncake at {config.master}",
            self._probe,
            threads=config.threads,
            failures_to_open=config.failures_to_open,
            probe_after_s=config.probe_after_s,
        )

    @classmethod
    def connect(cls, config: MooncakeConfig, memory: Bytes | None = None, *, wait_s: float = 10.0) -> Self:
        """Connects, and waits for it.

        Raises:
            StoreUnavailableError: not within `wait_s`.
            StoreError: Mooncake is not installed.
        """
        store = cls(config, memory)
        if not store.guard.wait_until_up(wait_s):
            store.close()
            raise StoreUnavailableError(f"no Mooncake master at {config.master} within {wait_s} s")
        return store

    def deadline_s(self, nbytes: int) -> float:
        """How long a transfer of that size may take."""
        return self.config.timeout_s + nbytes / self.config.bytes_per_s

    def put_from(self, meta: FeatureMeta, address: int, *, on_failure: Callable[[], None]) -> None:
        """Stores the `meta.nbytes` at `address`, which stay unchanged until this returns or `on_failure` is called.

        Returns when the store holds a value of this key, ours or one that was there, and it can be read.

        Raises:
            StoreUnavailableError: no answer in time, or another writer of this key has not finished.
            StoreFullError: no room.
        """

        def store(client: MooncakeClient, name: str) -> Outcome:
            parts, record = self._parts(client, address, meta.nbytes)
            if self._staged:
                ctypes.memmove(parts[0][0], address, meta.nbytes)
            return self._put(client, name, meta, parts, record)

        stored = self._call(store, meta.key, meta.nbytes, on_failure)
        if stored is Outcome.FULL:
            raise StoreFullError(f"{meta.key}: no room for {meta.nbytes} bytes in the second tier")
        if stored is Outcome.UNFINISHED:
            raise StoreUnavailableError(f"{meta.key}: another writer has not finished it")
        if stored is not Outcome.DONE:
            raise StoreUnavailableError(f"{meta.key}: put into the second tier, but cannot be read there yet")

    def size(self, key: str) -> int | None:
        """Bytes of the feature, or None when it is missing.

        Raises:
            CorruptFeatureError: what is there is no feature.
            StoreUnavailableError: no answer in time.
        """
        stored = self._call(MooncakeClient.size, key)
        if stored is not None and stored <= RECORD_BYTES:
            raise CorruptFeatureError(f"{key}: a value of {stored} bytes")
        return None if stored is None else stored - RECORD_BYTES

    def fetch_into(self, key: str, address: int, nbytes: int, *, on_failure: Callable[[], None]) -> FeatureMeta | None:
        """Reads a feature of `nbytes` (`size`) into `address`; None when it is missing, or its bytes are lost.

        The payload is *not* checked against `FeatureMeta.checksum` yet: `store.feature.verify_payload`. Until
        this returns or `on_failure` is called, anything may be written there.

        Raises:
            CorruptFeatureError: its record is not right.
            StoreUnavailableError: no answer in time.
        """

        def load(client: MooncakeClient, name: str) -> FeatureMeta | None:
            parts, record = self._parts(client, address, nbytes)
            outcome = client.get(name, parts)
            if outcome is Outcome.LOST:
                client.remove(name)  # so that it is missing for all, and can be put anew
            if outcome is not Outcome.DONE:
                return None
            if self._staged:
                ctypes.memmove(address, parts[0][0], nbytes)
            return decoded(record.tobytes(), key, nbytes)

        return self._call(load, key, nbytes, on_failure)

    def remove(self, key: str) -> bool:
        """Whether it was there. At once, also under a reader: it will find the bytes corrupt."""
        return self._call(MooncakeClient.remove, key) is Outcome.DONE

    def drop_corrupt(self, key: str) -> None:
        """Removes a value whose bytes are wrong; without raising, as its finder already does."""
        try:
            self.remove(key)
        except StoreError as error:
            log.warning("%s is corrupt and could not be removed: %s", key, error)

    def close(self) -> None:
        """Waits for calls in progress, but not for stuck ones: then the connection ends with the process."""
        if not self.guard.close(self.config.timeout_s):
            log.warning("%s: left with calls in progress", self.guard.name)
            return
        client, self.client = self.client, None
        if client is not None:  # not in the caller's thread, which may be the model's: its stream is not to be changed
            leaving = threading.Thread(target=self._leave, args=(client,), name="Mooncake leaves", daemon=True)
            leaving.start()
            leaving.join(_LEAVE_S)

    def _leave(self, client: MooncakeClient) -> None:
        try:
            self.config.begin_thread()
            client.close()
        except StoreError as error:
            log.warning("%s was not left: %s", self.guard.name, error)

    def _call(self, fn: Call[T], key: str, nbytes: int = 0, on_failure: Callable[[], None] = lambda: None) -> T:
        """`fn` with the client and the key's name, on a thread of the guard, whose deadline follows from the bytes that
        it moves; 0 for a question to the master."""
        checked_key(key)
        name, asked = self.config.namespace + key, self.guard.state == "up"

        def begun() -> T:
            self.config.begin_thread()
            if self.client is None:
                raise StoreUnavailableError(f"{self.guard.name}: not connected")
            return fn(self.client, name)

        try:
            # The master alone answers calls that move no bytes: they say nothing of the owners.
            return self.guard.call(begun, timeout_s=self.deadline_s(nbytes), on_failure=on_failure, proof=nbytes > 0)
        except StoreUnavailableError:
            if nbytes and asked:
                self._suspect = name
            raise

    def _parts(self, client: MooncakeClient, address: int, nbytes: int) -> tuple[Sequence[Part], Bytes]:
        """What the calling thread transfers, payload and record in one, and the record: the payload at `address`, or in
        memory of this thread."""
        payload_bytes = nbytes if self._staged else 0
        place: Bytes | None = getattr(self._own, "place", None)
        if place is None or place.nbytes < payload_bytes + RECORD_BYTES:
            self._own.place = None
            if place is not None:
                client.unregister(place.ctypes.data)
            place = self._memory(payload_bytes + RECORD_BYTES)
            client.register(place.ctypes.data, place.nbytes)
            self._own.place = place
        record = place[payload_bytes : payload_bytes + RECORD_BYTES]
        start = place.ctypes.data if self._staged else address
        return [(start, nbytes), (record.ctypes.data, RECORD_BYTES)], record

    def _memory(self, nbytes: int) -> Bytes:
        """So many bytes or more, doubled from place to place."""
        most = max(1 << (nbytes - 1).bit_length(), mmap.PAGESIZE)
        make = self.config.host_memory
        return np.frombuffer(mmap.mmap(-1, most), dtype=np.uint8) if make is None else make(most)

    def _put(
        self, client: MooncakeClient, name: str, meta: FeatureMeta, parts: Sequence[Part], record: Bytes
    ) -> Outcome:
        """`DONE`: a value of this feature can be read back, ours or another's. Else how the last try of several ended:
        `FULL`, `UNFINISHED` (by another writer of the name), or it went to memory whose owner is gone, and the master
        does not know yet."""
        deadline, tries = time.monotonic() + self.config.timeout_s / 2, 0
        while True:
            record[:] = np.frombuffer(encoded(meta), dtype=np.uint8)
            outcome = client.put(name, parts)
            full = outcome is Outcome.FULL
            if not full:
                outcome = _read_back(client, name, meta, record)
            if outcome is Outcome.DONE or time.monotonic() > deadline or (full and tries == _FULL_RETRIES):
                return outcome
            if not full and outcome is not Outcome.UNFINISHED:
                client.remove(name)  # of an owner that is gone, or not what it should be
            tries += 1
            time.sleep(_PUT_NAP_S)

    def _probe(self) -> None:
        """Runs while the breaker is open: connects if need be, then asks for what was not answered last."""
        self.config.begin_thread()
        client = self.client or self._connect()
        client.size(self.config.namespace + "probe")
        if self._suspect:
            started = time.monotonic()
            client.get_range(self._suspect, 0, (self._probing.ctypes.data, 1))
            if time.monotonic() - started > self.config.timeout_s:
                raise StoreUnavailableError("Mooncake: an owner of features does not answer")
            self._suspect = ""

    def _connect(self) -> MooncakeClient:
        client = MooncakeClient(self.config)
        try:
            self._probing = self._memory(1)
            for place in (*self._in_place, self._probing):
                client.register(place.ctypes.data, place.nbytes)
        except StoreError:
            client.close()
            raise
        self.client = client
        return client


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


def remove_all(master: str, keys: Sequence[str]) -> int:
    """How many of the keys were there.

    Raises:
        StoreError: Mooncake does not load, or its master does not answer in time.
    """
    store = MooncakeStore.connect(MooncakeConfig(master=master))
    try:
        return sum(store.remove(key) for key in keys)
    finally:
        store.close()


if __name__ == "__main__":
    try:
        print(remove_all(sys.argv[1], sys.stdin.read().split()))
    except StoreError as error:
        sys.exit(str(error))
