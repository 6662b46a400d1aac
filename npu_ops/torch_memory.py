"""Device memory by torch: the CPU, CUDA devices and Ascend NPUs, which differ in streams and in what a host copy needs.

The contract, and the rules that its users keep, are in `npu_ops.memory`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from npu_ops.blocks import (
    BlockRun,
    Blocks,
    Indices,
    gather_by_copies,
    gather_by_index,
    proves_blocks,
    scatter_by_copies,
    scatter_by_index,
)
from npu_ops.buffers import PAGE, Bounce, nothing_registered, pinned, register_with_cuda
from npu_ops.fences import EventFence, ReachedFence, TimedFence
from npu_ops.memory import NPU_ALIGNMENT, DeviceBlock, DeviceMemory, DeviceMemoryError

logger = logging.getLogger(__name__)


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

    def fence(self) -> Callable[[], None]:
        return _reached

    def timed_fence(self) -> TimedFence:
        return ReachedFence()

    def to_host(self, source: torch.Tensor) -> torch.Tensor:
        return source.to("cpu", copy=True)

    def download(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def to_device(self, source: torch.Tensor) -> torch.Tensor:
        return source

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        raw = torch.empty(nbytes + PAGE, dtype=torch.uint8)
        return raw[-raw.data_ptr() % PAGE :][:nbytes]

    def register_host(self, memory: torch.Tensor) -> Callable[[], None]:
        return nothing_registered

    def gather(self, target: torch.Tensor, rows: Sequence[Blocks], runs: Sequence[BlockRun]) -> None:
        gather_by_copies(self.copy, target, rows, runs)

    def scatter(self, rows: Sequence[Blocks], runs: Sequence[BlockRun], source: torch.Tensor) -> None:
        scatter_by_copies(self.copy, rows, runs, source)


class HostMemory(_TorchMemory):
    """The CPU: device memory is host memory, all copies are done when they return."""

    host_visible = True

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), 64)

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        # Not torch's copy where bytes are flat: each thread that calls it gets a team of OpenMP's, beside the model's.
        if target.is_contiguous() and source.is_contiguous():
            target.numpy()[:] = source.numpy()
        else:
            super().upload(target, source)


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

    def fence(self) -> Callable[[], None]:
        recorded = EventFence(self._module)

        def wait() -> None:
            self._module.set_device(self.device)  # as Ascend demands of every thread that touches an NPU
            recorded.wait()

        return wait

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
        gather_by_index(target, rows, runs, self._indices())

    def scatter_indexed(self, rows: Sequence[Blocks], runs: Sequence[BlockRun], source: torch.Tensor) -> None:
        """`scatter`, on trust."""
        scatter_by_index(rows, runs, source, self._indices())

    def download(self, target: torch.Tensor, source: torch.Tensor) -> None:
        # Not the blocking copy: it would spin on its stream, on a core that launches kernels. But a strided target is
        # filled from a flat one on the host, for which only the blocking copy waits.
        target.copy_(source, non_blocking=target.is_contiguous())
        self.timed_fence().wait()

    def to_device(self, source: torch.Tensor) -> torch.Tensor:
        # From page-locked memory, or the copy would wait for all that the stream has queued. torch's allocator of such
        # memory notes the copy and gives the memory out again only when it is over: nobody has to keep it.
        return source.pin_memory().to(self.device, non_blocking=True)

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        return pinned(nbytes)

    def _indices(self) -> Indices:
        """This thread's: its stream writes and reads them."""
        if not hasattr(self._streams, "indices"):
            self._streams.indices = Indices(self.to_device)
        indices: Indices = self._streams.indices
        return indices

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

    def register_host(self, memory: torch.Tensor) -> Callable[[], None]:
        return register_with_cuda(memory, self.device)


class NpuMemory(_StreamMemory):
    """An Ascend NPU. `npu_ops.memory` says which symbols are called for it."""

    def __init__(self, index: int) -> None:
        import torch_npu  # noqa: F401  (makes torch.npu; imported late: it needs CANN's shared libraries)

        super().__init__(torch.npu, torch.device("npu", index))

    def download(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self._bounces(target, source):
            self._bounce().download(target, source)
        else:
            super().download(target, source)

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self._bounces(source, target):
            self._bounce().upload(target, source)
        else:
            super().upload(target, source)

    def _bounces(self, host: torch.Tensor, other: torch.Tensor) -> bool:
        return host.is_contiguous() and other.is_contiguous() and host.dim() == 1 and not host.is_pinned()

    def _bounce(self) -> Bounce:
        """This thread's: its stream reads and writes the halves."""
        if not hasattr(self._streams, "bounce"):
            self._streams.bounce = Bounce(self.host_buffer, _queued, lambda: self.timed_fence().wait)
        bounce: Bounce = self._streams.bounce
        return bounce


def _reached() -> None:
    """Where all copies are done when they return."""


def _queued(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


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
