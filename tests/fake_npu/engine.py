"""Mooncake's Transfer Engine between fake devices: one-sided writes, as strict and as blind as the library. For tests.

A write reads its source and changes its target when it runs, in a thread of the engine, whatever streams have queued.
The calls and what they return are those of `mooncake.engine.TransferEngine`, as its source has them (0.3.11 to 0.3.13):

    batch       has a task per descriptor. Tasks complete one by one, in any order, late or never (`FakeNetwork`); the
                number is an address, 0 where the batch was not accepted. 0.3.11.post1 answers 2^64 - 1, that is -1,
                where it finds nobody at the address (`says_minus_one`)
    status      0 pending, 1 done, -1 failed, -2 too late, of the batch's first task only. What was written of a failed
                task, or will be, it does not say
    freeing     1 and -1 free the batch if each of its tasks was asked for and had ended, so never one of several
                descriptors: it stays for good (`unfreed`). -2 frees nothing, the batch may be asked again
    lists       `batch_transfer_sync_write` returns 0 when all of a list is there, else -1, and frees it; where a
                descriptor is late or lost it gives up when all others have ended
    crash       asking for a batch that is none, or is freed: `EngineCrashedError`, which no product code can catch

With `ascend` the rules of its Ascend Direct Transport hold on top of it:

    thread without set_device, second engine of a process     refused
    registration: address not a multiple of 2 MB, memory that ACL did not allocate, overlap, more than 256 regions
    write: memory that is not registered, at either end; more than 2048 descriptors
    pair on one device ("not support connect with self device"): fails, unless the network allows it

What a product must never do is also noted in `FakeDevice.broken`; that a pair on one device fails is not, because it
can only be found by trying.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Sequence

from npu_ops.memory import MAX_REGIONS, NPU_ALIGNMENT
from tests.fake_npu.device import FakeDevice, RuleBrokenError
from tests.fake_npu.network import DONE, FAILED, PENDING, FakeNetwork, Peer, Task, Tasks, execute

MAX_DESCRIPTORS = 2048
REFUSED, NO_BATCH, MINUS_ONE = -1, 0, 2**64 - 1


class EngineCrashedError(BaseException):
    """The process would be gone: native code read memory that is none."""


class FakeTransferEngine:
    """The engine of one process on one device."""

    def __init__(self, network: FakeNetwork, device: FakeDevice) -> None:
        self.device = device
        self.regions: list[tuple[int, int]] = []  # (address, end)
        self._network = network
        self._ascend = True
        self._port = 0
        self._numbers = itertools.count(0x7F0000000000, 64)
        self._batches: dict[int, list[Task]] = {}
        self.status_queries = 0  # how often the status of a batch was asked for
        self._tasks = Tasks(network)

    def initialize(self, host: str, metadata: str, protocol: str, device_name: str) -> int:
        self._ascend = protocol == "ascend"
        if not self._entered("initialize"):
            return REFUSED
        if metadata != "P2PHANDSHAKE":
            return self._breaks(f"initialize with metadata server {metadata!r}, which nobody runs")
        if self.device.engine is not None:
            return self._breaks("a second engine in one process")
        self.device.engine = self
        self._port = self._network.join(host, self)
        if not self._network.by_hand:
            threading.Thread(target=execute, args=(self._tasks,), name="fake-engine", daemon=True).start()
            weakref.finalize(self, self._tasks.close)
        return 0

    def get_rpc_port(self) -> int:
        return self._port

    def register_memory(self, address: int, nbytes: int) -> int:
        if not self._entered("register"):
            return REFUSED
        if self._ascend and address % NPU_ALIGNMENT:
            return self._breaks(f"register {address:#x}: not a multiple of 2 MB")
        if self._ascend and not self.device.owns(address, nbytes):
            return self._breaks(f"register {nbytes} bytes at {address:#x}: not the device's memory")
        if any(address < end and start < address + nbytes for start, end in self.regions):
            return self._breaks(f"register {address:#x}: overlaps what is registered")
        if self._ascend and len(self.regions) >= MAX_REGIONS:
            return self._breaks(f"more than {MAX_REGIONS} registered regions")
        self.regions.append((address, address + nbytes))
        return 0

    def batch_transfer_async_write(
        self, session: str, sources: Sequence[int], targets: Sequence[int], sizes: Sequence[int]
    ) -> int:
        """The number of the batch; its tasks run behind."""
        if not self._entered("write"):
            return NO_BATCH
        if len(sources) > MAX_DESCRIPTORS:
            self._breaks(f"a batch of {len(sources)} descriptors")
            return NO_BATCH
        target = self._network.at(session)
        if target is None:
            return MINUS_ONE if self._network.says_minus_one else NO_BATCH
        descriptors = list(zip(sources, targets, sizes, strict=True))
        tasks = [Task(*descriptor, self._network.fault(descriptor)) for descriptor in descriptors]
        number = next(self._numbers)
        self._batches[number] = tasks
        reached = self._reaches(target)
        for task in tasks:
            if not reached or not self._registered(task, target):
                task.status = FAILED
        self._tasks.put([task for task in tasks if task.status == PENDING])
        return number

    def batch_transfer_sync_write(
        self, session: str, sources: Sequence[int], targets: Sequence[int], sizes: Sequence[int]
    ) -> int:
        """0 when all is there. It asks for the status itself until then."""
        number = self.batch_transfer_async_write(session, sources, targets, sizes)
        if number in (NO_BATCH, MINUS_ONE):
            return REFUSED
        tasks = self._batches.pop(number)
        while self.pending and any(task.status == PENDING for task in tasks):
            self.status_queries += 1
            if self._network.by_hand:
                self.run()
            else:
                time.sleep(1e-4)
        return 0 if all(task.status == DONE for task in tasks) else REFUSED

    def transfer_check_status(self, number: int) -> int:
        if not self._entered("check a write"):
            return FAILED
        self.status_queries += 1
        if number not in self._batches:
            self._breaks(f"status of batch {number:#x}, which is none or is freed")
            raise EngineCrashedError(f"segmentation fault at {number:#x}")
        tasks = self._batches[number]
        status = tasks[0].status
        if status in (DONE, FAILED):
            tasks[0].seen_ended = True
            if all(task.seen_ended for task in tasks):
                del self._batches[number]
        return status

    def run(self, most: int = 1) -> None:
        """Runs some of what waits, where the network is `by_hand`."""
        for _ in range(min(most, len(self._tasks.waiting))):
            self._tasks.end(self._tasks.take())

    def land(self, which: Callable[[tuple[int, int, int]], bool] = lambda descriptor: True) -> int:
        """Lets what is late of these (source, target, bytes) land; how many did."""
        landing = [task for task in self._tasks.late if which((task.source, task.target, task.nbytes))]
        for task in landing:
            self._tasks.late.remove(task)
            task.land()
        return len(landing)

    @property
    def pending(self) -> int:
        """Tasks that were accepted and have not run."""
        return len(self._tasks.waiting) + self._tasks.running

    @property
    def unfreed(self) -> int:
        """Batches whose memory the engine still holds."""
        return len(self._batches)

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether these bytes are registered, all in one region."""
        return any(start <= address and address + nbytes <= end for start, end in self.regions)

    def _reaches(self, target: Peer) -> bool:
        same = target is not self and target.device.place == self.device.place
        return self._network.connects_with_self or not (self._ascend and same)

    def _registered(self, task: Task, target: Peer) -> bool:
        if not self.holds(task.source, task.nbytes):
            self._breaks(f"write of {task.nbytes} bytes from {task.source:#x}, which are not registered")
            return False
        if not target.holds(task.target, task.nbytes):
            self._breaks(f"write of {task.nbytes} bytes to {task.target:#x}, which are not registered there")
            return False
        return True

    def _entered(self, what: str) -> bool:
        if not self._ascend:
            return True
        try:
            self.device.check_entered(what)
        except RuleBrokenError:
            return False  # it is noted
        return True

    def _breaks(self, rule: str) -> int:
        self.device.breaks(rule)
        return REFUSED
