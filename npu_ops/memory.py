"""Device memory as transfers need it: flat slabs at aligned addresses, copies in stream order, fences, checks.

One protocol, `DeviceMemory`; `HostMemory`, `CudaMemory` and `NpuMemory` in `torch_memory.py`, `FakeDevice` in
`tests/fake_npu/device.py` for tests. Who transfers must keep the rules of the strictest of them, the NPU:

1. every thread of ours calls `enter_thread` before it touches the device; the model's thread is bound by vLLM, and
   must not call it: it would leave the stream that the model runs on;
2. what is handed to a transport starts at a multiple of `alignment`;
3. a transport, and every other thread's stream, reads and writes memory without regard to this stream: wait for a
   fence recorded after the last queued write before it reads, and after the last queued read before it writes.

Streams never wait for one another here; fences that a host thread waits for are enough, because whoever goes on is
told by the host:

    P, model's thread       records a fence on the model's stream after a layer's KV was queued
    P, link's thread        waits for it, then reads on its own stream (`download`: done on return) or one-sidedly; what
                            it reads of blocks that a later step overwrites does not count (`Outgoing.invalidate`)
    D, receiver's thread    writes on its own stream (`upload`), waits for a fence before it says Credit or hears DONE;
                            blocks are offered (READY) only when no step in flight uses them any more
    D, model's thread       queues reads of the blocks only in steps after the request was reported, so after that wait

NPU contract. The symbols called for an NPU, here, in `torch_memory.py`, `fences.py`, `buffers.py` and `blocks.py`, and
where they are documented (M: Mooncake's Ascend Direct Transport, `ascend_direct_transport.md` and its source;
T: torch_npu 2.10, `torch_npu.npu.__all__`):

    torch.npu.set_device                       T; M: first, in every thread
    torch.npu.Stream(device), set_stream       T; each thread of ours has a stream, as with CUDA
    torch.npu.Event(enable_timing)             T; vllm-ascend's `notify_kv_cache_written` records one per layer
    event.record, query, elapsed_time (ms)     T; never `synchronize` (M: may hang before CANN 8.5.RC1)
    2 MB alignment, 256 regions                M
    pin_memory, is_pinned                      T; vllm-ascend's `simple_kv_offload` pins its host blocks so
    index_select(out=), index_copy_            CANN `aclnnIndexSelect`, `aclnnInplaceIndexCopy`: int64 to uint8

All else is torch (`empty`, `copy_`, `data_ptr`, views). Moves of blocks by index are trusted only after
`proves_blocks`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from npu_ops.blocks import BlockRun, Blocks
from npu_ops.fences import TimedFence

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

    def to_device(self, source: torch.Tensor) -> torch.Tensor:
        """Queues a copy into new memory of the device's allocator. The host memory is the device's from now on."""

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        """Flat host memory that starts a page, page-locked where there is a bus. Freed with its last reference."""

    def register_host(self, memory: torch.Tensor) -> Callable[[], None]:
        """Page-locks flat host memory that exists, where that is possible; else warns or does nothing.

        The returned function undoes it: before the memory is unmapped, and when no copy of it is under way.
        """

    def gather(self, target: torch.Tensor, rows: Sequence[Blocks], runs: Sequence[BlockRun]) -> None:
        """Queues the gathering of blocks into flat bytes of this device: per row, per run, per block.

        All memory is this device's, and rows are not `target`. Raises BlocksError before anything is queued.
        """

    def scatter(self, rows: Sequence[Blocks], runs: Sequence[BlockRun], source: torch.Tensor) -> None:
        """Queues the way back: what `gather` would put into `source` goes to the blocks, unless it is not `wanted`.

        No block may be wanted twice. Raises BlocksError before anything is queued.
        """
