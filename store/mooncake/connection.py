"""One process's connection to a Mooncake Store: begun in the background, given up when calls hang, regained by itself.

Every call has a deadline and passes one breaker. What is asked over it is `store.mooncake.tier`'s business; what
Mooncake is told, `store.mooncake.client`'s.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections.abc import Callable, Iterable
from typing import TypeAlias, TypeVar

import numpy as np

from store.checksum import Bytes
from store.errors import StoreError, StoreUnavailableError
from store.mooncake.breaker import Guard
from store.mooncake.client import MooncakeClient, MooncakeConfig, load_mooncake

log = logging.getLogger(__name__)
T = TypeVar("T")
Call: TypeAlias = Callable[[MooncakeClient, str], T]
"""What asks a Mooncake Store something about the value of this name."""


class Connection:
    """Thread-safe. Until it is connected, every call raises StoreUnavailableError.

    Attributes:
        guard: its breaker. client: None until it has connected for the first time, and after `close`.
    """

    def __init__(self, config: MooncakeConfig, memory: Iterable[Bytes]) -> None:
        """Begins to connect.

        Args:
            memory: registered with the connection, as long as it lasts.

        Raises:
            StoreError: Mooncake is not installed.
        """
        load_mooncake(config.host)
        self.config = config
        self.client: MooncakeClient | None = None
        self._lock = threading.Lock()
        self._probing: Bytes = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), dtype=np.uint8)
        self._registered = [(place.ctypes.data, place.nbytes) for place in (*memory, self._probing)]
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

    def register(self, address: int, nbytes: int) -> None:
        """Makes memory usable in transfers. It stays mapped until `close` has returned."""
        with self._lock:
            if self.client is not None:
                self.client.register(address, nbytes)
            self._registered.append((address, nbytes))

    def deadline_s(self, nbytes: int) -> float:
        """How long a transfer of that size may take."""
        return self.config.timeout_s + nbytes / self.config.bytes_per_s

    def call(self, fn: Call[T], name: str, nbytes: int, on_failure: Callable[[], None]) -> T:
        """Calls `fn` with the client and `name`, on a thread of the guard.

        Args:
            nbytes: that it moves, from which its deadline follows; 0 for a question to the master.
            on_failure: as in `Guard.call`.

        Raises:
            StoreUnavailableError: not connected, or no answer in time.
        """
        late_calls = self.guard.late_calls
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

    def close(self) -> None:
        """Waits for calls in progress, but not for stuck ones: then the connection ends with the process."""
        if not self.guard.close(self.config.timeout_s):
            log.warning("%s: left with calls in progress", self.guard.name)
            return
        with self._lock:
            client, self.client = self.client, None
        if client is not None:
            client.close()

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
