"""Host memory that a device copies from and to at the speed of its bus, and without the calling thread: page-locked.

A device reads and writes pageable memory through a small buffer of its driver, piece by piece, while the caller waits.
Three ways out, one for each case:

    memory that we allocate            `DeviceMemory.host_buffer`: page-locked by torch; freed with its last reference
    memory that exists, on CUDA        `DeviceMemory.register_host`: a mapping of shared memory is page-locked where it
                                       lies; whoever registered it calls the returned function before it is unmapped
    memory that exists, on an NPU      `Bounce`: torch_npu 2.10 has no call that registers memory (vllm-ascend's
                                       `simple_kv_offload` says the same), so copies go through two page-locked
                                       halves in turns: while the device fills one, this thread empties the other

Registering may fail (limits, a kernel without support): a warning, and the pageable path, which is slower and right.
Neither the registering nor the bounce has run on a card; the tests run them on the fake device and on recorded calls.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

logger = logging.getLogger(__name__)

PAGE = 4096
_HALF_BYTES = 2 << 20  # long enough for the bus, short enough to start early

Undo = Callable[[], None]


def pinned(nbytes: int) -> torch.Tensor:
    """Flat page-locked bytes that start a page. torch has to know the device: it has been touched before."""
    raw = torch.empty(nbytes + PAGE, dtype=torch.uint8, pin_memory=True)
    return raw[-raw.data_ptr() % PAGE :][:nbytes]


def nothing_registered() -> None:
    """What undoes a registration that was none."""


def register_with_cuda(memory: torch.Tensor, device: torch.device) -> Undo:
    """Page-locks flat host memory for CUDA. The device is set in this thread."""
    runtime: Any = torch.cuda.cudart()
    address, nbytes = memory.data_ptr(), memory.numel()
    result = runtime.cudaHostRegister(address, nbytes, 0)
    if result.value:
        logger.warning("%d bytes at %#x could not be page-locked (%s): copies are slower", nbytes, address, result)
        with contextlib.suppress(RuntimeError):  # the next launch would find this error and take it for its own
            torch.zeros(1, device=device)
        return nothing_registered

    def undo() -> None:
        if failed := runtime.cudaHostUnregister(address).value:
            logger.warning("%d bytes at %#x stay page-locked (CUDA error %d)", memory.numel(), address, failed)

    return undo


@dataclass
class _Half:
    memory: torch.Tensor
    wait: Callable[[], None] | None = None  # until the device is done with it
    target: torch.Tensor | None = None  # where to its bytes go then


class Bounce:
    """Copies of any length between pageable memory and a device, in turns through two page-locked halves.

    For one thread and its stream.

    Args:
        make: page-locked memory of so many bytes. move: queues a copy (target, source) between that and the device.
        fence: recorded on this thread's stream; the returned function waits for it.
    """

    def __init__(
        self,
        make: Callable[[int], torch.Tensor],
        move: Callable[[torch.Tensor, torch.Tensor], None],
        fence: Callable[[], Callable[[], None]],
        half_bytes: int = _HALF_BYTES,
    ) -> None:
        self._halves = [_Half(make(half_bytes)) for _ in range(2)]
        self._half_bytes = half_bytes
        self._move, self._fence = move, fence
        self._turn = 0

    def download(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Device to host, flat bytes; done on return."""
        try:
            for start in range(0, source.numel(), self._half_bytes):
                part = source[start : start + self._half_bytes]
                half = self._next()
                self._move(half.memory[: part.numel()], part)
                half.wait, half.target = self._fence(), target[start : start + part.numel()]
        finally:  # also after a failure: nothing may be written to `target` when it has another use
            for _ in self._halves:
                self._next()

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Host to device, flat bytes; read on return, there after a fence."""
        for start in range(0, source.numel(), self._half_bytes):
            part = source[start : start + self._half_bytes]
            half = self._next()
            half.memory[: part.numel()].copy_(part)
            self._move(target[start : start + part.numel()], half.memory[: part.numel()])
            half.wait = self._fence()

    def _next(self) -> _Half:
        """The half whose turn it is, free: what it held is where it belongs."""
        half = self._halves[self._turn]
        self._turn = 1 - self._turn
        wait, target = half.wait, half.target
        half.wait = half.target = None
        if wait is not None:
            wait()
        if target is not None:
            target.copy_(half.memory[: target.numel()])
        return half
