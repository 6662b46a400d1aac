"""The second tier as the device path sees it: objects moved between its segments and registered memory of ours.

`MooncakeTier` is it for real (`tcp` with host memory, `ascend` with an NPU's; the same calls); tests have one with an
NPU's rules. Errors are the store's. All threads that call Mooncake enter the device first.

NPU contract. What reaches Mooncake from here goes through `store.mooncake.client`, as its Ascend Direct Transport
(`ascend_direct_transport.md`) has it:

    setup(host, "P2PHANDSHAKE", …, "ascend", …)   the protocol's name
    register_buffer of 2 MB aligned addresses     at most 256: here one slab per process
    put and get from registered device memory     the calls of TCP
    no connection between processes of one NPU    before CANN 9.1 (Mooncake #3453): decided by `device_probe.py`
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from store.feature import FeatureMeta
from store.mooncake.tier import MooncakeStore

PROBE_BYTES = 4096


class DeviceTier(Protocol):
    """`settled`: called exactly once, from any thread, when the call touches the memory no more. Normally that is
    before it returns or raises; after a deadline it comes when the stuck call has ended, and until then the memory
    must not be reused."""

    def register(self, address: int, nbytes: int) -> None:
        """Makes memory usable for the calls below. `address` is aligned as its device demands."""

    def put_from(self, key: str, address: int, nbytes: int, settled: Callable[[], None]) -> bool:
        """Stores a copy. False: it is there already.

        Raises:
            StoreFullError: no room. StoreError: the tier did not answer, or refused.
        """

    def fetch_into(self, key: str, address: int, capacity: int, settled: Callable[[], None]) -> int | None:
        """Size of the object; it is in memory unless that is more than `capacity`. None: there is no such object.

        Raises:
            StoreError: the tier did not answer, or refused.
        """


def object_name(key: str) -> str:
    """A feature's name in the tier. Not that of the host path: the trailer behind the bytes is another."""
    return f"{key}@device1"


def probe_key(incarnation: str) -> str:
    """The key of the object by which consumers try whether they reach this life of an encoder."""
    return f"probe/{incarnation}"


class MooncakeTier:
    """A `DeviceTier` over a Mooncake Store made with `begin_thread=memory.enter_thread`.

    Payload and our trailer are one value for the store, whose own trailer (with no checksum: that would need the bytes
    on the host) follows from host memory.
    """

    def __init__(self, store: MooncakeStore) -> None:
        self._store = store

    def register(self, address: int, nbytes: int) -> None:
        self._store.register(address, nbytes)

    def put_from(self, key: str, address: int, nbytes: int, settled: Callable[[], None]) -> bool:
        self._store.put_from(FeatureMeta(key, (nbytes,), "uint8", nbytes, None), address, on_failure=settled)
        settled()
        return True

    def fetch_into(self, key: str, address: int, capacity: int, settled: Callable[[], None]) -> int | None:
        size = None
        try:
            size = self._store.size(key)
        finally:
            if size is None or size > capacity:  # missing, or the question failed: nothing was written
                settled()
        if size is None or size > capacity:
            return size
        meta = self._store.fetch_into(key, address, size, on_failure=settled)
        settled()
        return size if meta is not None else None
