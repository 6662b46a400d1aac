"""Tier 2 of the MM Store: a Mooncake Store, which joins hosts.

Owns what a transfer may touch for how long, what answers mean, and this process's connection: begun in the background,
given up when calls hang (`store.mooncake.breaker`), regained by itself. What a value is: `store.mooncake.values`; what
Mooncake is told: `store.mooncake.client`.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections.abc import Callable
from typing import Self, TypeAlias, TypeVar

import numpy as np

from store.checksum import Bytes
from store.errors import CorruptFeatureError, StoreError, StoreUnavailableError
from store.feature import RECORD_BYTES, FeatureMeta, checked_key
from store.mooncake.breaker import Guard, State
from store.mooncake.client import MooncakeClient, MooncakeConfig, Outcome, load_mooncake
from store.mooncake.values import Scratch, load_value, store_value

log = logging.getLogger(__name__)
T = TypeVar("T")
Call: TypeAlias = Callable[[MooncakeClient, str], T]
"""What asks a Mooncake Store something about the value of this name."""


class MooncakeStore:
    """The transfers in place that `store.feature_pool` is made of. Thread-safe.

    They copy nothing: their memory is registered (`register`), and must not be reused before they end, which may be
    long after they have raised: `on_failure` says when. Until it is connected every call raises StoreUnavailableError.

    Attributes:
        guard: its breaker. client: None until it has connected for the first time, and after `close`.
    """

    def __init__(self, config: MooncakeConfig) -> None:
        """Begins to connect, in the background.

        Raises:
            StoreError: Mooncake is not installed.
        """
        load_mooncake(config.host)
        self.config = config
        self.client: MooncakeClient | None = None
        self._lock = threading.Lock()
        self._scratch = Scratch(config.threads)
        self._probing: Bytes = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), dtype=np.uint8)
        self._registered = [(place.ctypes.data, place.nbytes) for place in (self._scratch.memory, self._probing)]
        self._suspect = ""  # read by the probe: the value whose transfer was given up last
        self.guard = Guard(
            f"Mooncake at {config.master}",
            self._probe,
            timeout_s=config.timeout_s,
            threads=config.threads,
            failures_to_open=config.failures_to_open,
            probe_after_s=config.probe_after_s,
            is_open=True,
        )

    @classmethod
    def connect(cls, config: MooncakeConfig, *, wait_s: float = 10.0) -> Self:
        """Connects, and waits for it.

        Raises:
            StoreUnavailableError: not within `wait_s`.
            StoreError: Mooncake is not installed.
        """
        store = cls(config)
        if not store.guard.wait_until_up(wait_s):
            store.close()
            raise StoreUnavailableError(f"no Mooncake master at {config.master} within {wait_s} s")
        return store

    @property
    def state(self) -> State:
        return self.guard.state

    def deadline_s(self, nbytes: int) -> float:
        """How long a transfer of that size may take."""
        return self.config.timeout_s + nbytes / self.config.bytes_per_s

    def register(self, address: int, nbytes: int) -> None:
        """Makes memory usable in `put_from` and `fetch_into`. It stays mapped until `close` has returned."""
        with self._lock:
            if self.client is not None:
                self.client.register(address, nbytes)
            self._registered.append((address, nbytes))

    def put_from(self, meta: FeatureMeta, address: int, *, on_failure: Callable[[], None]) -> None:
        """Stores the `meta.nbytes` at `address`, which stay unchanged until this returns or `on_failure` is called.

        Returns when the store holds a value of this key, ours or one that was there, and it can be read.

        Raises:
            StoreUnavailableError: no answer in time, or another writer of this key has not finished.
            StoreFullError: no room.
        """
        patience_s = self.config.timeout_s / 2

        def store(client: MooncakeClient, name: str) -> Outcome:
            return store_value(client, name, meta, address, self._scratch, patience_s)

        stored = self._call(store, meta.key, meta.nbytes, on_failure)
        if stored is Outcome.UNFINISHED:
            raise StoreUnavailableError(f"{meta.key}: another writer has not finished it")
        if stored is Outcome.LOST:
            raise StoreUnavailableError(f"{meta.key}: put into the second tier, but cannot be read there yet")

    def size(self, key: str) -> int | None:
        """Bytes of the feature, or None when it is missing.

        Raises:
            CorruptFeatureError: what is there is no feature.
            StoreUnavailableError: no answer in time.
        """
        stored = self._call(MooncakeClient.size, key)
        if stored is not None and stored <= RECORD_BYTES:
            self.drop_corrupt(key)
            raise CorruptFeatureError(f"{key}: a value of {stored} bytes")
        return None if stored is None else stored - RECORD_BYTES

    def fetch_into(self, key: str, address: int, nbytes: int, *, on_failure: Callable[[], None]) -> FeatureMeta | None:
        """Reads a feature of `nbytes` (`size`) into `address`; None when it is missing, or its bytes are lost.

        The payload is *not* checked against `FeatureMeta.checksum` yet: `store.checksum.verify_payload`, and
        `drop_corrupt` if that fails. Until this returns or `on_failure` is called, anything may be written there.

        Raises:
            CorruptFeatureError: its record is not right; the value is dropped.
            StoreUnavailableError: no answer in time.
        """

        def load(client: MooncakeClient, name: str) -> FeatureMeta | None:
            return load_value(client, name, key, address, nbytes, self._scratch)

        try:
            return self._call(load, key, nbytes, on_failure)
        except CorruptFeatureError:
            self.drop_corrupt(key)
            raise

    def contains(self, key: str) -> bool:
        """Whether there is such a value. True also for one whose owner has just died."""
        return self._call(MooncakeClient.exists, key)

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
        with self._lock:
            client, self.client = self.client, None
        if client is not None:
            client.close()

    def _call(self, fn: Call[T], key: str, nbytes: int = 0, on_failure: Callable[[], None] = lambda: None) -> T:
        """`fn` with the client and the key's name, on a thread of the guard, whose deadline follows from the bytes that
        it moves; 0 for a question to the master."""
        name, late_calls = self._name(key), self.guard.late_calls
        try:
            # The master alone answers calls that move no bytes: they say nothing of the owners.
            return self.guard.call(
                lambda: fn(self._connected(), name),
                timeout_s=self.deadline_s(nbytes),
                on_failure=on_failure,
                proof=nbytes > 0,
            )
        except StoreUnavailableError:
            if nbytes and self.guard.late_calls != late_calls:
                self._suspect = name
            raise

    def _name(self, key: str) -> str:
        checked_key(key)
        return self.config.namespace + key

    def _connected(self) -> MooncakeClient:
        client = self.client
        if client is None:
            raise StoreUnavailableError(f"{self.guard.name}: not connected")
        return client

    def _probe(self) -> None:
        """Runs while the breaker is open: connects if need be, then asks for what was not answered last."""
        client = self.client
        if client is None:
            client = self._connect()
        client.exists(self.config.namespace + "probe")
        if self._suspect:
            started = time.monotonic()
            client.get_range(self._suspect, 0, (self._probing.ctypes.data, 1))
            if time.monotonic() - started > self.config.timeout_s:
                raise StoreUnavailableError("Mooncake: an owner of features does not answer")
            self._suspect = ""

    def _connect(self) -> MooncakeClient:
        client = MooncakeClient(self.config)
        with self._lock:
            try:
                for address, nbytes in self._registered:
                    client.register(address, nbytes)
            except StoreError:
                client.close()
                raise
            self.client = client
        return client
