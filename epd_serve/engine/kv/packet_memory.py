"""Device memory that staged packets pass through, one at a time: taken when the worker starts, and never more of it.

Where the CPU cannot read the KV cache in place, P gathers a slice of a packet here before one copy over the bus, and D
takes it from there. All links of a worker share it: they share the bus too. What of a device's memory KV transfers take
is planned with (`epd_serve.stage_memory`), for vLLM sizes the KV cache before a connector exists.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from epd_serve.engine.kv.transport import LinkError
from npu_ops.memory import DeviceMemory


class PacketMemory:
    """Any thread that has entered the device may borrow it. The calling one has set it.

    Raises:
        DeviceMemoryError: the device has no room for it.
    """

    def __init__(self, device: DeviceMemory, nbytes: int) -> None:
        self._memory = device.allocate(nbytes).data
        if device.host_visible:
            self._memory.zero_()  # its pages are made here, and not in the probes that are timed
        self._lock = threading.Lock()

    @contextmanager
    def borrow(self, nbytes: int) -> Iterator[torch.Tensor]:
        """Flat bytes, until the end of the block: then nothing that was queued may use them any more.

        Raises:
            LinkError: there are not so many.
        """
        if nbytes > self._memory.numel():
            raise LinkError(f"{nbytes} bytes at once, where packets pass through {self._memory.numel()}")
        with self._lock:
            yield self._memory[:nbytes]
