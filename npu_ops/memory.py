"""Device memory as transfers need it: flat slabs at aligned addresses, copies in stream order, fences, checks.

One protocol, `DeviceMemory`; `HostMemory`, `CudaMemory` and `NpuMemory` here, `npu_ops.fake.FakeDevice` for tests. Who
transfers must keep the rules of the strictest of them, the NPU:

1. every thread of ours calls `enter_thread` before it touches the device; the model's thread is bound by vLLM, and
   must not call it: it would leave the stream that the model runs on;
2. what is handed to a transport starts at a multiple of `alignment`;
3. a transport, and every other thread's stream, reads and writes memory without regard to this stream: wait for a
   fence recorded after the last queued write before it reads, and after the last queued read before it writes.

Streams never wait for one another here; fences that a host thread waits for are enough, because whoever goes on is
told by the host:

    P, model's thread       records a fence on the model's stream after a layer's KV was queued
    P, link's thread        waits for it, then reads on its own stream (`download`: done on return) or one-sidedly; a
                            step that overwrites blocks starts only when no packet of them is being read
    D, receiver's thread    writes on its own stream (`upload`), waits for a fence before it says Credit or hears DONE;
                            blocks are offered (READY) only when no step in flight uses them any more
    D, model's thread       queues reads of the blocks only in steps after the request was reported, so after that wait

NPU contract. The symbols called for an NPU, here and in `fences.py`, and where they are documented (A:
reference/ascend.md, T: torch_npu 2.10 `torch_npu.npu.__all__`):

    torch.npu.set_device                       A "Mooncake on Ascend" (every thread first), "Devices"
    torch.npu.Stream(device), set_stream       T; each thread of ours has a stream, as with CUDA
    torch.npu.Event(enable_timing, blocking)   T; A "KV cache on Ascend" (vllm-ascend records one event per layer)
    event.record, query, elapsed_time (ms)     T
    event.synchronize                          T; A "Mooncake on Ascend" (may hang before CANN 8.5.RC1)
    2 MB alignment, 256 regions                A "Mooncake on Ascend"
    Tensor.pin_memory                          T; vllm-ascend's `simple_kv_offload` pins its host blocks so
    index_select(out=), index_copy_            CANN `aclnnIndexSelect`, `aclnnInplaceIndexCopy`: int64 to uint8

All else is torch (`empty`, `copy_`, `data_ptr`, views, `sum`). `total` is trusted only after `proves_total`, moves of
blocks by index only after `proves_blocks`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from npu_ops.blocks import (
    BlockRun,
    Blocks,
    gather_by_copies,
    gather_by_index,
    proves_blocks,
    scatter_by_copies,
    scatter_by_index,
)
from npu_ops.fences import EventFence, ReachedFence, TimedFence, fence

logger = logging.getLogger(__name__)

NPU_ALIGNMENT = 2 << 20
MAX_REGIONS = 256


class DeviceMemoryError(RuntimeError):
    """The device refused: no memory, or a rule above was broken."""


@dataclass(frozen=True)
class DeviceBlock:
    """Memory that its owner keeps for life. `data` is flat uint8 on the device; `address` is that of its first byte."""

    data: torch.Tensor
    address: int
    nbytes: int


class DeviceMemory(Protocol):
    """One device's memory, for one process.

    Attributes:
        name: `cpu`, `cuda:0`, `npu:3`.
        alignment: what the address of a registered region must be a multiple of.
        host_visible: the CPU may read the bytes in place, at memory speed.
    """

    name: str
    alignment: int
    host_visible: bool

    def enter_thread(self) -> None:
        """Binds the calling thread to the device (rule 1), with a stream of its own where the device lets it."""

    def allocate(self, nbytes: int, alignment: int | None = None) -> DeviceBlock:
        """Uninitialised memory at a multiple of `alignment` (default: the device's)."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queues a copy of equal-sized flat bytes on this thread's stream; `source` may be small host memory."""

    def clone(self, source: torch.Tensor) -> torch.Tensor:
        """Queues a copy into new memory of the device's allocator."""

    def fence(self) -> Callable[[], None]:
        """Recorded on this thread's stream; the returned function waits for it, in any thread that has entered."""

    def timed_fence(self) -> TimedFence:
        """Recorded on the calling thread's current stream, which is the model's in the model's thread."""

    def to_host(self, source: torch.Tensor) -> torch.Tensor:
        """A host copy, after all that this thread's stream has queued."""

    def download(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Device to host, after all that this thread's stream has queued; done on return. Either may be strided."""

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queues a copy from host to device; `source` must stay as it is until a fence recorded later was waited for.

        Either may be strided.
        """

    def gather(self, target: torch.Tensor, rows: Sequence[Blocks], runs: Sequence[BlockRun]) -> None:
        """Queues the gathering of blocks into flat bytes of this device: per row, per run, per block.

        All memory is this device's, and rows are not `target`. Raises BlocksError before anything is queued.
        """

    def scatter(self, rows: Sequence[Blocks], runs: Sequence[BlockRun], source: torch.Tensor) -> None:
        """Queues the way back: what `gather` would put into `source` goes to the blocks, unless it is not `wanted`.

        No block may be wanted twice. Raises BlocksError before anything is queued.
        """

    def total(self, source: torch.Tensor) -> int:
        """The sum of flat bytes read as little-endian int32 words, modulo 2^64, computed on the device."""


class _TorchMemory:
    """What torch does alike on every device."""

    host_visible = False

    def __init__(self, device: torch.device, alignment: int) -> None:
        self.device = device
        self.name = str(device)
        self.alignment = alignment

    def enter_thread(self) -> None:
        """Nothing to bind."""

    def allocate(self, nbytes: int, alignment: int | None = None) -> DeviceBlock:
        step = self.alignment if alignment is None else alignment
        try:
            raw = torch.empty(nbytes + step, dtype=torch.uint8, device=self.device)
        except RuntimeError as error:  # torch's out-of-memory errors are RuntimeErrors on every device
            raise DeviceMemoryError(f"{self.name} has no {nbytes} bytes: {error}") from error
        data = raw[-raw.data_ptr() % step :][:nbytes]
        return DeviceBlock(data, data.data_ptr(), nbytes)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        # Host memory may be pageable and gone the next moment: only copies within the device are left to the stream.
        target.copy_(source, non_blocking=source.device.type != "cpu")

    def clone(self, source: torch.Tensor) -> torch.Tensor:
        return source.clone()

    def fence(self) -> Callable[[], None]:
        return fence(self.device)

    def timed_fence(self) -> TimedFence:
        return ReachedFence()

    def to_host(self, source: torch.Tensor) -> torch.Tensor:
        return source.to("cpu", copy=True)

    def download(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def gather(self, target: torch.Tensor, rows: Sequence[Blocks], runs: Sequence[BlockRun]) -> None:
        gather_by_copies(self.copy, target, rows, runs)

    def scatter(self, rows: Sequence[Blocks], runs: Sequence[BlockRun], source: torch.Tensor) -> None:
        scatter_by_copies(self.copy, rows, runs, source)

    def total(self, source: torch.Tensor) -> int:
        return whole_words(source).sum(dtype=torch.int64).item() % (1 << 64)


class HostMemory(_TorchMemory):
    """The CPU: device memory is host memory, all copies are done when they return."""

    host_visible = True

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), 64)


class _StreamMemory(_TorchMemory):
    """A device with streams. Threads of ours get one each, so that a copy does not queue behind the next step.

    Args:
        module: `torch.cuda` or `torch.npu`, whose symbols of these names are the same.
    """

    def __init__(self, module: Any, device: torch.device) -> None:
        super().__init__(device, NPU_ALIGNMENT)
        self._module = module
        self._streams = threading.local()
        self._proving = threading.Lock()
        self._by_index: bool | None = None  # not tried yet

    def enter_thread(self) -> None:
        self._module.set_device(self.device)
        if not hasattr(self._streams, "own"):
            self._streams.own = self._module.Stream(self.device)
        self._module.set_stream(self._streams.own)

    def timed_fence(self) -> TimedFence:
        return EventFence(self._module)

    def gather(self, target: torch.Tensor, rows: Sequence[Blocks], runs: Sequence[BlockRun]) -> None:
        if self._moves_by_index():
            self.gather_indexed(target, rows, runs)
        else:
            super().gather(target, rows, runs)

    def scatter(self, rows: Sequence[Blocks], runs: Sequence[BlockRun], source: torch.Tensor) -> None:
        if self._moves_by_index():
            self.scatter_indexed(rows, runs, source)
        else:
            super().scatter(rows, runs, source)

    def gather_indexed(self, target: torch.Tensor, rows: Sequence[Blocks], runs: Sequence[BlockRun]) -> None:
        """`gather`, on trust."""
        gather_by_index(target, rows, runs, self._index)

    def scatter_indexed(self, rows: Sequence[Blocks], runs: Sequence[BlockRun], source: torch.Tensor) -> None:
        """`scatter`, on trust."""
        scatter_by_index(rows, runs, source, self._index)

    def _index(self, host: torch.Tensor) -> torch.Tensor:
        # From page-locked memory, or the copy would wait for all that the stream has queued. torch's allocator of such
        # memory notes the copy and gives the memory out again only when it is over: nobody has to keep it.
        return host.pin_memory().to(self.device, non_blocking=True)

    def _moves_by_index(self) -> bool:
        with self._proving:
            if self._by_index is None:
                doubt = proves_blocks(self, self.device)
                self._by_index = doubt is None
                if doubt is not None:
                    logger.warning("%s; each run of blocks is copied by itself", doubt)
            return self._by_index


class CudaMemory(_StreamMemory):
    """A CUDA device."""

    def __init__(self, index: int) -> None:
        super().__init__(torch.cuda, torch.device("cuda", index))


class NpuMemory(_StreamMemory):
    """An Ascend NPU. See the contract in the module docstring."""

    def __init__(self, index: int) -> None:
        import torch_npu  # noqa: F401  (makes torch.npu; imported late: it needs CANN's shared libraries)

        super().__init__(torch.npu, torch.device("npu", index))


def open_memory(kind: str, index: int = 0) -> DeviceMemory:
    """The memory of a device of this process. `kind`: `cpu`, `cuda` or `npu`, as vLLM's platform names it."""
    if kind == "cpu":
        return HostMemory()
    if kind == "cuda":
        return CudaMemory(index)
    if kind == "npu":
        return NpuMemory(index)
    raise DeviceMemoryError(f"no device memory of kind {kind!r}: cpu, cuda or npu")


def memory_here(kind: str) -> DeviceMemory:
    """The memory of the device that the calling thread has set, as vLLM's worker does before it makes connectors."""
    return open_memory(kind, torch.empty(0, device=kind).device.index or 0)


def whole_words(data: torch.Tensor) -> torch.Tensor:
    """The int32 words of flat bytes; up to three last bytes are left out."""
    return data[: data.numel() // 4 * 4].view(torch.int32)


def proves_total(memory: DeviceMemory) -> str | None:
    """Why `memory.total` cannot be trusted on this device, or None: it is tried on words whose sum is known.

    Not every device sums int32 into int64; this asks it instead of assuming. The calling thread has entered.
    """
    words = torch.tensor([2**31 - 1] * 513 + [-(2**31)] * 3 + [-1, 7], dtype=torch.int32)
    expected = int(words.sum(dtype=torch.int64).item()) % (1 << 64)
    pattern = words.view(torch.uint8)
    try:
        block = memory.allocate(pattern.numel())
        memory.copy(block.data, pattern)
        found = memory.total(block.data)
    except RuntimeError as error:
        return f"{memory.name} cannot sum on the device: {error}"
    return None if found == expected else f"{memory.name} sums int32 words to {found} instead of {expected}"
