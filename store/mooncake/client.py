"""One connection to a Mooncake Store: its calls in our words. Blocks as Mooncake blocks; knows no deadline, no codec.

What Mooncake listens on (0.3.13.post1, TCP, read from /proc/net/tcp and tcp6): the master's two ports lie on the
address it is given. Every client opens two more, whether it gives memory or not: its handshake port (0.0.0.0, the
15000s and 16000s) and its data port (::, likewise). Neither can be bound to one address: `MC_TCP_BIND_ADDRESS` only
chooses which address is *announced* to peers. Nothing authenticates them, and the data port reads and writes the
client's registered memory: a filter makes them answer at that address only (`store.addresses`), and where it is not
loopback they belong behind a firewall.

`setup` holds the GIL until the master answers, so we connect a socket to the master first, and Mooncake's own limits,
30 s and more, are lowered (unless the environment sets them): they bound how long a call that we gave up holds memory.

Its Ascend transport (`ascend_direct_transport.cpp`) asks more of its callers. Each thread has set the device
(`MooncakeConfig.begin_thread`). Memory is registered without saying whose it is, so it has to be memory that CANN
allocated (`host_memory`): shared memory and plain mmap are refused. And a process has one Transfer Engine, which KV
links and features share (`process_engine`); over TCP and RDMA each has its own.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from store.addresses import environment_at, reachable_only_at
from store.errors import StoreError, StoreUnavailableError
from store.feature import Bytes

_ENVIRONMENT = {
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",  # we retry; its 20 retries take 90 s
    "MC_RPC_TIMEOUT_MS": "3000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "1000",
    "MC_TCP_STATUS_TIMEOUT_SEC": "5",  # a peer that is stopped: the call ends after that long, not after 30 s
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "5",
    "MC_LOG_LEVEL": "ERROR",
}
LEAST_SEGMENT_BYTES = 16 << 20
ASCEND = "ascend"
INSTALL = "pip install 'epd-serve[mooncake]' (mooncake-cuda or mooncake-npu there), and apt-get install libibverbs1"

_FOREIGN = (
    "its transport takes no memory but what CANN allocated; give it some of the device's own "
    "(`host_memory`: `DeviceMemory.host_buffer`), neither mmap nor shared memory"
)

Part = tuple[int, int]  # address, bytes; within registered memory


class Outcome(Enum):
    """How a call ended that the store did answer."""

    DONE = auto()
    MISSING = auto()
    UNFINISHED = auto()  # somebody is writing it, or died while writing it
    FULL = auto()  # no room, or nobody gives any
    LOST = auto()  # the index has it, but its bytes cannot be had: its owner died


_CODES: dict[int, Outcome | str] = {
    -10: Outcome.FULL,  # BUFFER_OVERFLOW
    -101: Outcome.FULL,  # SEGMENT_NOT_FOUND: nobody has mounted memory
    -103: "the master does not know this client",  # CLIENT_NOT_FOUND: it restarted, the client is about to register
    -200: Outcome.FULL,  # NO_AVAILABLE_HANDLE
    -500: Outcome.LOST,  # WRITE_FAIL
    -702: Outcome.LOST,  # INVALID_REPLICA
    -703: Outcome.UNFINISHED,  # REPLICA_IS_NOT_READY
    -704: Outcome.MISSING,  # OBJECT_NOT_FOUND
    -705: Outcome.DONE,  # OBJECT_ALREADY_EXISTS; `put` says 0 for the same
    -707: "a read took longer than the master's lease",  # LEASE_EXPIRED: the value itself is whole
    -710: Outcome.MISSING,  # REPLICA_NOT_FOUND
    -712: Outcome.MISSING,  # REPLICA_IS_GONE
    -800: Outcome.LOST,  # TRANSFER_FAIL
    -801: Outcome.LOST,  # CHECKSUM_MISMATCH, Mooncake's own
    -900: "the master does not answer",  # RPC_FAIL
    -901: "the master did not answer in time",  # RPC_TIMEOUT
    -1000: "etcd does not answer",
    -1003: "etcd does not answer",
    -1005: "Kubernetes does not answer",
}
"""What a code says; in words where the store did not answer."""


def outcome(code: int, what: str) -> Outcome:
    """Reads the result of a call; 0 and above is done.

    Raises:
        StoreUnavailableError: the store did not answer.
        StoreError: a code that a correct call does not give; `what` says which call.
    """
    found = _CODES.get(code, Outcome.DONE if code >= 0 else None)
    if isinstance(found, str):
        raise StoreUnavailableError(f"Mooncake: {found} ({code})")
    if found is None:
        raise StoreError(f"Mooncake: {what}: error {code}")
    return found


@dataclass(frozen=True, kw_only=True)
class MooncakeConfig:
    """How a process uses a Mooncake Store.

    Attributes:
        master: `host:port` of the master.
        host: the address of this machine that peers connect to.
        protocol: `tcp`, `rdma` or `ascend`.
        segment_bytes: memory given to the store, 16 MiB or more; what this process puts is placed there first. 0: none.
        buffer_bytes: Mooncake's own buffers; we transfer from and to registered memory, so they stay small.
        timeout_s: deadline of a call, and
        bytes_per_s: the slowest transfer that is worth waiting for: it gets `nbytes / bytes_per_s` on top.
        threads: calls at one time.
        failures_to_open, probe_after_s: of the breaker (`store.mooncake.breaker`).
        namespace: put before every key, so that one master can serve other uses.
        begin_thread: called by each thread of ours before it calls Mooncake.
        host_memory: makes flat memory that the transport takes, of so many bytes at least; features are copied through
            it. None: any memory will do, and features are moved where they lie.
    """

    master: str
    host: str = "127.0.0.1"
    protocol: str = "tcp"
    segment_bytes: int = 0
    buffer_bytes: int = 16 << 20
    timeout_s: float = 1.0
    bytes_per_s: float = 200e6
    threads: int = 4
    failures_to_open: int = 2
    probe_after_s: float = 1.0
    namespace: str = "epd/"
    begin_thread: Callable[[], None] = lambda: None
    host_memory: Callable[[int], Bytes] | None = None


def load_mooncake(host: str) -> Any:
    """The module `mooncake.store`.

    Raises:
        StoreError: it is not installed or does not load; says what to do.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.update(environment_at(host))
    try:
        import mooncake.store
    except ImportError as error:
        raise StoreError(f"Mooncake does not load ({error}): {INSTALL}") from error
    return mooncake.store


_process_engines: list[Any] = []  # none or one
_one_begins = threading.Lock()


def begin_engine(make: Callable[[], Any], host: str, protocol: str) -> Any:
    """A Transfer Engine that listens at `host` alone, without a metadata server.

    Raises:
        StoreError: it does not start.
    """
    engine = make()
    with reachable_only_at(host):  # it binds its ports to every address
        if engine.initialize(host, "P2PHANDSHAKE", protocol, "") != 0:
            raise StoreError(f"Mooncake's Transfer Engine does not start on {host} with protocol {protocol}")
    return engine


def transfer_engine() -> Any:
    """A new `mooncake.engine.TransferEngine`. Raises StoreError where Mooncake does not load."""
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        raise StoreError(f"Mooncake does not load ({error}): {INSTALL}") from error
    return TransferEngine()


def process_engine(make: Callable[[], Any], host: str, protocol: str) -> Any:
    """The Transfer Engine that all of this process share. Whoever asks first begins it, on the device of their thread.

    Raises:
        StoreError: Mooncake does not load, or the engine does not start.
    """
    with _one_begins:
        if not _process_engines:
            _process_engines.append(begin_engine(make, host, protocol))
        return _process_engines[0]


class MooncakeClient:
    """Connected for its whole life; it reconnects by itself when its master returns. Thread-safe."""

    def __init__(self, config: MooncakeConfig) -> None:
        """Connects.

        Raises:
            StoreUnavailableError: the master is not there.
            StoreError: Mooncake does not load, or sets up no client here.
        """
        module = load_mooncake(config.host)
        _reach(config.master, config.timeout_s)
        self._store: Any = module.MooncakeDistributedStore()
        self._ascend = config.protocol == ASCEND
        self._registered: list[int] = []
        shared = None
        if self._ascend:
            engine = process_engine(transfer_engine, config.host, config.protocol)
            shared = engine.get_engine()
        with reachable_only_at(config.host):
            code = self._store.setup(
                config.host,
                "P2PHANDSHAKE",
                config.segment_bytes,
                config.buffer_bytes,
                config.protocol,
                "",  # it finds the network's devices itself
                config.master,
                shared,
            )
        if code != 0:
            raise StoreError(f"Mooncake: its client of the master at {config.master} does not come up ({code})")
        self._placement: Any = module.ReplicateConfig()
        if config.segment_bytes:
            self._placement.preferred_segment = self._store.get_hostname()

    def register(self, address: int, nbytes: int) -> None:
        """Makes memory usable in `put` and `get`. Raises StoreError where the transport refuses it."""
        if self._store.register_buffer(address, nbytes) != 0:
            why = f": {_FOREIGN}" if self._ascend else " failed"
            raise StoreError(f"Mooncake: registering {nbytes} bytes at {address:#x}{why}")
        self._registered.append(address)

    def unregister(self, address: int) -> None:
        """Before the memory goes."""
        self._registered.remove(address)
        if self._store.unregister_buffer(address) != 0:
            raise StoreError(f"Mooncake: unregistering {address:#x} failed")

    def size(self, name: str) -> int | None:
        """Bytes of the value; None when there is none that is complete."""
        code = int(self._store.get_size(name))
        return code if outcome(code, f"get_size of {name}") is Outcome.DONE else None

    def put(self, name: str, parts: Sequence[Part]) -> Outcome:
        """Stores the parts as one value. `DONE` also when the name was there: then the old value stays.

        And even when somebody else's put of it is unfinished, without storing anything: read back what matters.
        """
        lists = [[list(column)] for column in zip(*parts, strict=True)]
        (code,) = self._store.batch_put_from_multi_buffers([name], *lists, self._placement)
        return outcome(code, f"put of {name}")

    def get(self, name: str, parts: Sequence[Part]) -> Outcome:
        """Fills the parts, which together have the size of the value, in place."""
        (code,) = self._store.batch_get_into_multi_buffers(
            [name], *([list(column)] for column in zip(*parts, strict=True))
        )
        return outcome(code, f"get of {name}")

    def get_range(self, name: str, start: int, part: Part) -> Outcome:
        """Fills the part with the bytes of the value from `start` on."""
        address, nbytes = part
        (((code,),),) = self._store.get_into_ranges([address], [[name]], [[[0]]], [[[start]]], [[[nbytes]]])
        return outcome(code, f"get of {nbytes} bytes of {name}")

    def remove(self, name: str) -> Outcome:
        """Removes the value whether or not it is leased, or its owner gone."""
        return outcome(int(self._store.remove(name, True)), f"remove of {name}")

    def close(self) -> None:
        """Leaves the store; what lies in this process's memory is lost to it. Holds the GIL, up to seconds."""
        for address in self._registered:  # which an engine that others use would keep
            self._store.unregister_buffer(address)
        self._store.close()


def _reach(master: str, timeout_s: float) -> None:
    host, _, port = master.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s).close()
    except OSError as error:
        raise StoreUnavailableError(f"Mooncake: no master at {master}: {error}") from error
