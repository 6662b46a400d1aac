"""Mooncake's Transfer Engine between fake devices: one-sided writes, as strict and as blind as on Ascend. For tests.

A write reads its source and changes its target when it runs, in a thread of the engine, whatever streams have queued.
The calls and what they return are Mooncake's (`mooncake.engine.TransferEngine` 0.3.13: 0 is success, but a batch is 0
when it was not accepted; a status is 0 pending, 1 done, negative failed). The rules are those of reference/ascend.md:

    thread without set_device, second engine of a process     refused
    registration: address not a multiple of 2 MB, memory that is not the device's, overlap, more than 256 regions
    write: memory that is not registered, at either end; more than 2048 descriptors
    pair on one device ("not support connect with self device"): fails, unless the network allows it

What a product must never do is also noted in `FakeDevice.broken`; that a pair on one device fails is not, because it
can only be found by trying.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import queue
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from npu_ops.fake import FakeDevice, RuleBrokenError
from npu_ops.memory import MAX_REGIONS, NPU_ALIGNMENT

MAX_DESCRIPTORS = 2048
REFUSED, NO_BATCH = -1, 0
PENDING, DONE, FAILED = 0, 1, -1


class FakeNetwork:
    """What joins the engines of several processes.

    Attributes:
        connects_with_self: two processes of one device may be a pair, as from CANN 9.1 on.
        latency_s, bytes_per_s: how long a batch takes; may be changed at any time.
        gate: cleared, accepted batches do not run until it is set.
    """

    def __init__(
        self, *, connects_with_self: bool = False, latency_s: float = 0.0, bytes_per_s: float = math.inf
    ) -> None:
        self.connects_with_self = connects_with_self
        self.latency_s = latency_s
        self.bytes_per_s = bytes_per_s
        self.gate = threading.Event()
        self.gate.set()
        self._engines: dict[str, FakeTransferEngine] = {}
        self._ports = itertools.count(20000)

    def join(self, host: str, engine: FakeTransferEngine) -> int:
        """The RPC port at `host` under which other engines find this one."""
        port = next(self._ports)
        self._engines[f"{host}:{port}"] = engine
        return port

    def at(self, session: str) -> FakeTransferEngine | None:
        return self._engines.get(session)


@dataclass
class _Batch:
    network: FakeNetwork
    target: FakeTransferEngine
    copies: list[tuple[int, int, int]]  # source, target, bytes
    status: int = PENDING

    def run(self) -> None:
        self.network.gate.wait()
        time.sleep(self.network.latency_s)
        for source, target, nbytes in self.copies:
            time.sleep(nbytes / self.network.bytes_per_s)
            ctypes.memmove(target, source, nbytes)
        self.status = DONE


def _execute(batches: queue.SimpleQueue[_Batch | None]) -> None:
    while (batch := batches.get()) is not None:
        batch.run()
        del batch  # it leads to its engine, whose end this thread waits for


class FakeTransferEngine:
    """The engine of one process on one device."""

    def __init__(self, network: FakeNetwork, device: FakeDevice) -> None:
        self.device = device
        self.regions: list[tuple[int, int]] = []  # (address, end)
        self._network = network
        self._port = 0
        self._numbers = itertools.count(1)
        self._batches: dict[int, _Batch] = {}
        self._queue: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()

    def initialize(self, host: str, metadata: str, protocol: str, device_name: str) -> int:
        if not self._entered("initialize"):
            return REFUSED
        if metadata != "P2PHANDSHAKE":
            return self._breaks(f"initialize with metadata server {metadata!r}, which nobody runs")
        if self.device.engine is not None:
            return self._breaks("a second engine in one process")
        self.device.engine = self
        self._port = self._network.join(host, self)
        threading.Thread(target=_execute, args=(self._queue,), name="fake-engine", daemon=True).start()
        weakref.finalize(self, self._queue.put, None)
        return 0

    def get_rpc_port(self) -> int:
        return self._port

    def register_memory(self, address: int, nbytes: int) -> int:
        if not self._entered("register"):
            return REFUSED
        if address % NPU_ALIGNMENT:
            return self._breaks(f"register {address:#x}: not a multiple of 2 MB")
        if not self.device.owns(address, nbytes):
            return self._breaks(f"register {nbytes} bytes at {address:#x}: not the device's memory")
        if any(address < end and start < address + nbytes for start, end in self.regions):
            return self._breaks(f"register {address:#x}: overlaps what is registered")
        if len(self.regions) >= MAX_REGIONS:
            return self._breaks(f"more than {MAX_REGIONS} registered regions")
        self.regions.append((address, address + nbytes))
        return 0

    def batch_transfer_async_write(
        self, session: str, sources: Sequence[int], targets: Sequence[int], sizes: Sequence[int]
    ) -> int:
        """The number of the batch; it runs behind, in the order of the calls."""
        if not self._entered("write"):
            return NO_BATCH
        copies = list(zip(sources, targets, sizes, strict=True))
        if len(copies) > MAX_DESCRIPTORS:
            self._breaks(f"a batch of {len(copies)} descriptors")
            return NO_BATCH
        target = self._network.at(session)
        if target is None:
            return NO_BATCH
        number = next(self._numbers)
        batch = self._batches[number] = _Batch(self._network, target, copies)
        if not self._reaches(target) or not self._registered(batch):
            batch.status = FAILED
        else:
            self._queue.put(batch)
        return number

    def transfer_check_status(self, number: int) -> int:
        """Once it is not pending any more the batch is forgotten."""
        if not self._entered("check a write"):
            return FAILED
        if number not in self._batches:
            return self._breaks(f"status of batch {number}, which is none or was known to be over")
        status = self._batches[number].status
        if status != PENDING:
            del self._batches[number]
        return status

    @property
    def pending(self) -> int:
        """Batches that were accepted and have not run."""
        return sum(batch.status == PENDING for batch in list(self._batches.values()))

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether these bytes are registered, all in one region."""
        return any(start <= address and address + nbytes <= end for start, end in self.regions)

    def _reaches(self, target: FakeTransferEngine) -> bool:
        same = target is not self and target.device.place == self.device.place
        return self._network.connects_with_self or not same

    def _registered(self, batch: _Batch) -> bool:
        for source, target, nbytes in batch.copies:
            if not self.holds(source, nbytes):
                self._breaks(f"write of {nbytes} bytes from {source:#x}, which are not registered")
                return False
            if not batch.target.holds(target, nbytes):
                self._breaks(f"write of {nbytes} bytes to {target:#x}, which are not registered there")
                return False
        return True

    def _entered(self, what: str) -> bool:
        try:
            self.device.check_entered(what)
        except RuleBrokenError:
            return False  # it is noted
        return True

    def _breaks(self, rule: str) -> int:
        self.device.breaks(rule)
        return REFUSED
