"""A device that exists only to be used wrongly: an NPU's rules on CPU threads. For tests.

`FakeDevice` is a `DeviceMemory` over host memory. Each thread that has entered has a stream, which is a thread that
executes what was queued, in order, each operation `latency_s` (and its bytes' time) after the one before: a write is
visible to a transport, or to another stream, only when its stream got there. Waiting for nothing therefore reads old
bytes, as on hardware. A gate orders such tests without sleeping: `device.run(gate.wait)` holds the calling thread's
stream, for as long as the test likes. A call into a device may also never return (`hang`), and while a thread captures
a graph (`capturing`) calls of others break a rule. Its transport is in `engine.py`.

A broken rule raises `RuleBrokenError` and stays in `FakeDevice.broken`, whoever swallows the exception.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch

from npu_ops.blocks import BlockRun, Blocks, Indices, check_blocks, gather_by_index, scatter_by_index
from npu_ops.buffers import PAGE, nothing_registered
from npu_ops.fences import TimedFence, wait_until
from npu_ops.memory import NPU_ALIGNMENT, DeviceBlock, DeviceMemoryError

logger = logging.getLogger(__name__)

_POISON = 0xA5


class RuleBrokenError(DeviceMemoryError):
    """The caller did what an NPU refuses or punishes."""


class _Stream:
    """Executes in order, in a thread of its own, which ends when nobody can queue any more."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=_execute, args=(self._queue,), name="fake-stream", daemon=True).start()
        weakref.finalize(self, self._queue.put, None)

    def enqueue(self, operation: Callable[[], None]) -> None:
        self._queue.put(operation)

    def event(self) -> FakeEvent:
        event = FakeEvent()
        self._queue.put(event.reach)
        return event


def _execute(operations: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (operation := operations.get()) is not None:
        operation()
        del operation  # it may be what keeps the stream's owner alive


class FakeEvent:
    """A place in a stream."""

    def __init__(self) -> None:
        self.at_s: float | None = None

    def reach(self) -> None:
        self.at_s = time.perf_counter()

    def query(self) -> bool:
        return self.at_s is not None

    def wait(self) -> None:
        wait_until(self.query)


class FakeTimedFence:
    """`TimedFence` on a `FakeDevice`."""

    def __init__(self, device: FakeDevice, event: FakeEvent) -> None:
        self._device = device
        self._event = event

    def wait(self) -> None:
        self._device.check_entered("wait")
        self._device.waits.append(self._event)
        try:
            self._event.wait()
        finally:
            self._device.waits.remove(self._event)

    def seconds_since(self, earlier: TimedFence) -> float | None:
        assert isinstance(earlier, FakeTimedFence)
        if earlier._event.at_s is None or self._event.at_s is None:
            return None
        return self._event.at_s - earlier._event.at_s


class FakeDevice:
    """`DeviceMemory` with rules. `place` tells devices apart: two `FakeDevice`s of one place are two processes on it.

    Attributes:
        latency_s: how late each queued operation runs; may be changed at any time.
        bytes_per_s: how fast copies are, on each stream; likewise.
        broken: every rule that was broken, in order.
        engine: the Transfer Engine of this process, once it has one (`engine.py`).
        waits: fences that threads wait for.
        registered: host memory that is page-locked now, from address to end.
    """

    host_visible = False
    alignment = NPU_ALIGNMENT

    def __init__(
        self,
        place: str = "host0/npu0",
        *,
        latency_s: float = 0.0,
        bytes_per_s: float = math.inf,
        registers: bool = True,
    ) -> None:
        self.name = f"fake:{place}"
        self.place = place
        self.latency_s = latency_s
        self.bytes_per_s = bytes_per_s
        self.broken: list[str] = []
        self.engine: object | None = None
        self.waits: list[FakeEvent] = []
        self.registered: list[tuple[int, int]] = []
        self._registers = registers
        self._hanging: set[str] = set()
        self._released = threading.Event()
        self._capturing: threading.Thread | None = None
        self._bound = threading.local()
        self._blocks: list[DeviceBlock] = []
        self._host: list[torch.Tensor] = []

    def enter_thread(self) -> None:
        self._begin("enter_thread")
        if not hasattr(self._bound, "stream"):
            self._bound.stream = _Stream()

    def hang(self, *calls: str) -> None:
        """From now on these calls, by the names that errors give them, return in no thread before `release`."""
        self._hanging.update(calls)

    def release(self) -> None:
        """Ends every call that hangs; nothing hangs any more."""
        self._hanging.clear()
        self._released.set()

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """The calling thread captures a graph, in mode "global"."""
        self._capturing = threading.current_thread()
        try:
            yield
        finally:
            self._capturing = None

    def allocate(self, nbytes: int, alignment: int | None = None) -> DeviceBlock:
        self._stream("allocate")
        step = self.alignment if alignment is None else alignment
        raw = torch.empty(nbytes + 2 * self.alignment, dtype=torch.uint8)
        start = -raw.data_ptr() % self.alignment
        if step % self.alignment:
            start += step  # aligned as asked and no better: luck must not hide a missing alignment
        block = DeviceBlock(raw[start : start + nbytes].fill_(_POISON), raw.data_ptr() + start, nbytes)
        self._blocks.append(block)
        return block

    def run(self, operation: Callable[[], object]) -> None:
        """Queues a computation, such as a model step that writes a feature."""
        self._queue(self._stream("run"), operation)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        stream = self._stream("copy")
        self._check_mine(target, "copy to")
        if not self._is_mine(source):
            source = source.clone()  # pageable host memory is read at the call
        self._queue(stream, lambda: target.copy_(source), target.numel())

    def fence(self) -> Callable[[], None]:
        return self.timed_fence().wait

    def timed_fence(self) -> FakeTimedFence:
        return FakeTimedFence(self, self._stream("fence").event())

    def to_host(self, source: torch.Tensor) -> torch.Tensor:
        self._stream("to_host").event().wait()
        return source.clone()

    def download(self, target: torch.Tensor, source: torch.Tensor) -> None:
        stream = self._stream("download")
        self._check_mine(source, "download from")
        self._check_host(target, "download to")
        self._queue(stream, lambda: target.copy_(source), target.numel())
        stream.event().wait()

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        stream = self._stream("upload")
        self._check_mine(target, "upload to")
        self._check_host(source, "upload from")
        self._queue(stream, lambda: target.copy_(source), target.numel())

    def to_device(self, source: torch.Tensor) -> torch.Tensor:
        block = self.allocate(source.numel())
        self.upload(block.data, source)
        return block.data

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        self._stream("host_buffer")
        raw = torch.empty(nbytes + PAGE, dtype=torch.uint8)
        self._host.append(raw)
        return raw[-raw.data_ptr() % PAGE :][:nbytes].fill_(_POISON)

    def owns_host(self, address: int, nbytes: int) -> bool:
        """Whether these bytes of the host are page-locked memory that was allocated here."""
        return any(raw.data_ptr() <= address and address + nbytes <= raw.data_ptr() + raw.numel() for raw in self._host)

    def register_host(self, memory: torch.Tensor) -> Callable[[], None]:
        self._stream("register_host")
        self._check_host(memory, "register")
        if not self._registers:
            logger.warning("%s registers no memory: copies are slower", self.name)
            return nothing_registered
        span = (memory.data_ptr(), memory.data_ptr() + memory.numel())
        if any(start < span[1] and span[0] < end for start, end in self.registered):
            raise self.breaks("register memory that is registered")
        self.registered.append(span)

        def undo() -> None:
            if span not in self.registered:
                raise self.breaks("undo a registration twice")
            self.registered.remove(span)

        return undo

    def gather(self, target: torch.Tensor, rows: Sequence[Blocks], runs: Sequence[BlockRun]) -> None:
        stream = self._stream("gather")
        self._check_blocks(rows, runs, target, "gather")
        self._queue(stream, lambda: gather_by_index(target, rows, runs, Indices(torch.clone)), target.numel())

    def scatter(self, rows: Sequence[Blocks], runs: Sequence[BlockRun], source: torch.Tensor) -> None:
        stream = self._stream("scatter")
        self._check_blocks(rows, runs, source, "scatter")
        wanted = [block for run in runs if run.wanted for block in range(run.first, run.first + run.count)]
        if len(wanted) != len(set(wanted)):
            raise self.breaks("scatter to one block twice")
        self._queue(stream, lambda: scatter_by_index(rows, runs, source, Indices(torch.clone)), source.numel())

    def waited_for(self) -> bool:
        """Whether a thread waits for a fence that is not reached yet."""
        return any(event.at_s is None for event in list(self.waits))

    @property
    def allocated_bytes(self) -> int:
        """All that was ever allocated here."""
        return sum(block.nbytes for block in self._blocks)

    def owns(self, address: int, nbytes: int) -> bool:
        """Whether these bytes were allocated here."""
        return any(
            block.address <= address and address + nbytes <= block.address + block.nbytes for block in self._blocks
        )

    def check_entered(self, what: str) -> None:
        """Raises RuleBrokenError unless the calling thread has set this device."""
        self._stream(what)

    def breaks(self, rule: str) -> RuleBrokenError:
        """Notes a broken rule; the caller raises what this returns."""
        self.broken.append(rule)
        return RuleBrokenError(f"{self.name}: {rule}")

    def _begin(self, what: str) -> None:
        if what in self._hanging:
            self._released.wait()
        caller = threading.current_thread()
        if self._capturing not in (None, caller):
            raise self.breaks(f"{what} in thread {caller.name}, while another captures a graph")

    def _stream(self, what: str) -> _Stream:
        self._begin(what)
        stream: _Stream | None = getattr(self._bound, "stream", None)
        if stream is None:
            raise self.breaks(f"{what} in thread {threading.current_thread().name}, which has not set the device")
        return stream

    def _queue(self, stream: _Stream, operation: Callable[[], object], nbytes: int = 0) -> None:
        def late() -> None:
            time.sleep(self.latency_s + nbytes / self.bytes_per_s)
            try:
                operation()
            except Exception as error:  # a dead stream would look like a slow one
                logger.exception("%s: a queued operation failed", self.name)
                self.broken.append(f"a queued operation failed: {error}")

        stream.enqueue(late)

    def _is_mine(self, data: torch.Tensor) -> bool:
        if not data.numel():
            return True  # it has no address
        reach = 1 + sum((size - 1) * stride for size, stride in zip(data.shape, data.stride(), strict=True))
        return self.owns(data.data_ptr(), reach * data.element_size())

    def _check_blocks(self, rows: Sequence[Blocks], runs: Sequence[BlockRun], flat: torch.Tensor, what: str) -> None:
        check_blocks(rows, runs, flat)
        for data in (flat, *(row.data for row in rows)):
            self._check_mine(data, what)

    def _check_mine(self, data: torch.Tensor, what: str) -> None:
        if not self._is_mine(data):
            raise self.breaks(f"{what} memory that is not the device's")

    def _check_host(self, data: torch.Tensor, what: str) -> None:
        if self.owns(data.data_ptr(), 1):
            raise self.breaks(f"{what} memory of the device, where the host's is meant")
