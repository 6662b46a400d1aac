"""Tier 2 of the MM Store: a Mooncake Store, which joins hosts.

Owns what a transfer may touch for how long, and what answers mean. When the connection is given up and regained:
`store.mooncake.connection`; what a value is: `store.mooncake.values`.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Self, TypeVar

import numpy as np

from store.checksum import Buffer, Bytes, as_bytes, copy, copy_with_checksum
from store.codec import TRAILER_BYTES, encode_trailer, verify_payload
from store.errors import CorruptFeatureError, StoreError, StoreUnavailableError
from store.feature import FeatureMeta, StoreStats
from store.interface import FeatureStore
from store.mooncake.breaker import Guard, State
from store.mooncake.client import MooncakeClient, MooncakeConfig
from store.mooncake.codes import Outcome
from store.mooncake.connection import Call, Connection
from store.mooncake.values import PrivateLease, Scratch, load_value, store_value

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_KEY = 192  # as long as the arena takes


class MooncakeStore:
    """A `store.interface.FeatureStore`, and the transfers in place that `store.feature_pool` is made of. Thread-safe.

    `put`, `get_into` and `lease` go through memory of their own. `put_from` and `fetch_into` copy nothing: their memory
    is registered (`register`), and must not be reused before they end, which may be long after they have raised:
    `on_failure` says when.
    """

    def __init__(self, config: MooncakeConfig) -> None:
        """Begins to connect, in the background; until that succeeds every call raises StoreUnavailableError.

        Raises:
            StoreError: Mooncake is not installed.
        """
        self.config = config
        self._scratch = Scratch(config.threads)
        self._counts = dict.fromkeys(("puts", "hits", "misses", "corrupt"), 0)
        self.connection = Connection(config, [self._scratch.memory])

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
    def guard(self) -> Guard:
        return self.connection.guard

    @property
    def state(self) -> State:
        return self.guard.state

    def deadline_s(self, nbytes: int) -> float:
        """How long a transfer of that size may take."""
        return self.connection.deadline_s(nbytes)

    def register(self, address: int, nbytes: int) -> None:
        """Makes memory usable in `put_from` and `fetch_into`. It stays mapped until `close` has returned."""
        self.connection.register(address, nbytes)

    def put_from(self, meta: FeatureMeta, address: int, *, on_failure: Callable[[], None]) -> None:
        """Stores the `meta.nbytes` at `address`, which stay unchanged until this returns or `on_failure` is called.

        Returns when the store holds a value of this key, ours or one that was there, and it can be read.

        Raises:
            StoreUnavailableError: no answer in time, or another writer of this key has not finished.
            StoreFullError: no room.
        """
        self._finished(meta.key, self._call(self._storing(meta, address), meta.key, meta.nbytes, on_failure))

    def size(self, key: str) -> int | None:
        """Bytes of the feature, or None when it is missing.

        Raises:
            CorruptFeatureError: what is there is no feature.
            StoreUnavailableError: no answer in time.
        """
        stored = self._call(MooncakeClient.size, key)
        if stored is None:
            self._counts["misses"] += 1
            return None
        if stored <= TRAILER_BYTES:
            self.drop_corrupt(key)
            raise CorruptFeatureError(f"{key}: a value of {stored} bytes")
        return stored - TRAILER_BYTES

    def fetch_into(self, key: str, address: int, nbytes: int, *, on_failure: Callable[[], None]) -> FeatureMeta | None:
        """Reads a feature of `nbytes` (`size`) into `address`; None when it is missing, or its bytes are lost.

        The payload is *not* checked against `FeatureMeta.checksum` yet: `store.codec.verify_payload`, and
        `drop_corrupt` if that fails. Until this returns or `on_failure` is called, anything may be written there.

        Raises:
            CorruptFeatureError: its trailer is not right; the value is dropped.
            StoreUnavailableError: no answer in time.
        """
        try:
            meta = self._call(self._loading(key, address, nbytes), key, nbytes, on_failure)
        except CorruptFeatureError:
            self.drop_corrupt(key)
            raise
        self._counts["misses" if meta is None else "hits"] += 1
        return meta

    def put(self, key: str, data: Buffer, *, shape: Sequence[int], dtype: str) -> bool:
        """See `FeatureStore.put`. Two that put the same key at the same time may both be told True."""
        source = as_bytes(data, "data")
        if source.nbytes < 1:
            raise StoreError("a feature has at least one byte")
        if self.contains(key):
            return False
        staging = np.frombuffer(mmap.mmap(-1, source.nbytes), dtype=np.uint8)
        digest = copy_with_checksum(staging, source)
        meta = FeatureMeta(key, tuple(shape), dtype, source.nbytes, digest)
        encode_trailer(meta)  # refuses what does not fit before anything is sent
        store = _registered(staging, self._storing(meta, staging.ctypes.data))
        self._finished(key, self._call(store, key, source.nbytes))
        return True

    def contains(self, key: str) -> bool:
        """See `FeatureStore.contains`. True also for a value whose owner has just died."""
        return self._call(MooncakeClient.exists, key)

    def lease(self, key: str, *, verify: bool = True) -> PrivateLease | None:
        """See `FeatureStore.lease`: a private copy, so it holds nothing in the store."""
        nbytes = self.size(key)
        if nbytes is None:
            return None
        staging = np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8)
        load = _registered(staging, self._loading(key, staging.ctypes.data, nbytes))
        try:
            meta = self._call(load, key, nbytes)
            if meta is not None and verify:
                verify_payload(meta, staging)
        except CorruptFeatureError:
            self.drop_corrupt(key)
            raise
        self._counts["misses" if meta is None else "hits"] += 1
        return None if meta is None else PrivateLease(meta, staging)

    def get_into(self, key: str, dest: Buffer, *, verify: bool = True) -> FeatureMeta | None:
        """See `FeatureStore.get_into`."""
        target = as_bytes(dest, "dest")
        if not target.flags.writeable:
            raise StoreError("dest is read-only")
        lease = self.lease(key, verify=verify)
        if lease is None:
            return None
        if target.nbytes < lease.meta.nbytes:
            raise StoreError(f"dest of {target.nbytes} bytes for a feature of {lease.meta.nbytes}")
        copy(target[: lease.meta.nbytes], as_bytes(lease.view(), "stored"))
        return lease.meta

    def remove(self, key: str) -> bool:
        """See `FeatureStore.remove`. At once, also under a reader: it will find the bytes corrupt."""
        return self._call(MooncakeClient.remove, key) is Outcome.DONE

    def drop_corrupt(self, key: str) -> None:
        """Counts and removes a value whose bytes are wrong; without raising, as its finder already does."""
        self._counts["corrupt"] += 1
        try:
            self.remove(key)
        except StoreError as error:
            log.warning("%s is corrupt and could not be removed: %s", key, error)

    def stats(self) -> StoreStats:
        """Of this process alone; what the whole store holds, its master's `/metrics` say."""
        return StoreStats(
            capacity_bytes=self.config.segment_bytes,
            used_bytes=0,
            features=0,
            leased=0,
            **self._counts,
            evictions=0,
            reclaimed=0,
        )

    def close(self) -> None:
        """Waits for calls in progress, but not for stuck ones: then the connection ends with the process."""
        self.connection.close()

    def _call(self, fn: Call[T], key: str, nbytes: int = 0, on_failure: Callable[[], None] = lambda: None) -> T:
        return self.connection.call(fn, self._name(key), nbytes, on_failure)

    def _storing(self, meta: FeatureMeta, address: int) -> Call[Outcome]:
        def store(client: MooncakeClient, name: str) -> Outcome:
            stored = store_value(client, name, meta, address, self._scratch, self.config.timeout_s / 2)
            self._counts["puts"] += stored is Outcome.DONE
            return stored

        return store

    def _loading(self, key: str, address: int, nbytes: int) -> Call[FeatureMeta | None]:
        return lambda client, name: load_value(client, name, key, address, nbytes, self._scratch)

    def _finished(self, key: str, stored: Outcome) -> None:
        if stored is Outcome.UNFINISHED:
            raise StoreUnavailableError(f"{key}: another writer has not finished it")
        if stored is Outcome.LOST:
            raise StoreUnavailableError(f"{key}: put into the second tier, but cannot be read there yet")

    def _name(self, key: str) -> str:
        try:
            key.encode()
        except UnicodeEncodeError as error:
            raise StoreError(f"key {key!r}: {error.reason}") from error
        if not 0 < len(key) <= MAX_KEY:
            raise StoreError(f"key of {len(key)} characters; 1 to {MAX_KEY} fit")
        return self.config.namespace + key


def _registered(memory: Bytes, transfer: Call[T]) -> Call[T]:
    """The transfer, with its memory registered meanwhile."""

    def registered(client: MooncakeClient, name: str) -> T:
        client.register(memory.ctypes.data, memory.nbytes)
        try:
            return transfer(client, name)
        finally:
            client.unregister(memory.ctypes.data)

    return registered


if TYPE_CHECKING:
    _is_a_tier: type[FeatureStore] = MooncakeStore
