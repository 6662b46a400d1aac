"""Runs operators of `operators.py` on one device, over and over, and says when each sample began and ended.

Owns the process's device, its threads and its share of the cores. Who runs beside it is the measurement's business.
"""

from __future__ import annotations

import os
import time

import torch

from bench.micro.interference.calls import Call, call_of
from bench.micro.interference.operators import Sizes
from bench.micro.interference.ring import Ring
from npu_ops.core_grants import CoreGrant, CoreOrder
from npu_ops.core_limits import cpu_grant, cuda_grant, limit_npu
from npu_ops.memory import DeviceMemory
from npu_ops.torch_memory import open_memory

Span = tuple[float, float]
"""When a sample began and ended: seconds of CLOCK_MONOTONIC, which the processes of a machine share."""

SAMPLE_S = 0.002
"""A sample is as many calls as take about so long: to wait for a device takes some tens of microseconds itself."""

MOST_REPEATS = 1000


class Prepared:
    """A call, warmed up. `repeats`: calls in one sample."""

    def __init__(self, memory: DeviceMemory, call: Call) -> None:
        self._memory, self._call = memory, call
        for _ in range(2):  # the first one chooses, compiles and loads the kernel
            self._sample(1)
        begun, ended = self._sample(1)
        self.repeats = min(MOST_REPEATS, max(1, round(SAMPLE_S / max(ended - begun, 1e-6))))

    def run(self, begin: float, end: float) -> list[Span]:
        """Samples back to back from `begin` until one ends after `end`."""
        if (wait_s := begin - time.monotonic()) > 0:
            time.sleep(wait_s)
        spans = [self._sample(self.repeats)]
        while spans[-1][1] < end:
            spans.append(self._sample(self.repeats))
        return spans

    def _sample(self, repeats: int) -> Span:
        begun = time.monotonic()
        for _ in range(repeats):
            self._call()
        self._memory.fence()()
        return begun, time.monotonic()


class Runner:
    """The operators on one device, in this process. Made before anything else touches the device.

    Args:
        kind, index: of the device. order: its share of the cores; None: all of them.

    Attributes:
        grant: what of the cores it really has; None where no share was ordered.

    Raises:
        CoreLimitError: it does not have the cores that it should have.
    """

    def __init__(self, kind: str, index: int, sizes: Sizes, order: CoreOrder | None = None) -> None:
        self._kind, self._index, self._sizes = kind, index, sizes
        if order is not None and kind == "cpu":
            os.sched_setaffinity(0, order.cores)
            torch.set_num_threads(len(order.cores))
        self._memory = open_memory(kind, index)
        if order is not None and kind == "npu":
            torch.npu.set_device(index)
            self.grant: CoreGrant | None = limit_npu(torch.npu, index, order)  # before anything runs on it
        self._memory.enter_thread()
        if order is None:
            self.grant = None
        elif kind != "npu":
            self.grant = cpu_grant(0, order) if kind == "cpu" else cuda_grant(0, order)
        self._device = torch.device(kind) if kind == "cpu" else torch.device(kind, index)
        self._prepared: dict[str, Prepared] = {}
        self._ring: Ring | None = None

    def prepare(self, name: str) -> Prepared:
        """The operator, made and warmed up when it is first asked for. Raises RuntimeError where torch cannot."""
        if name not in self._prepared:
            if name == "all_reduce":
                self._ring = Ring(self._kind, self._index, self._sizes.reduce_bytes)
            with torch.inference_mode():
                call = call_of(name, self._sizes, self._device, self._ring)
                self._prepared[name] = Prepared(self._memory, call)
        return self._prepared[name]

    def run(self, name: str, begin: float, end: float) -> list[Span]:
        """See `Prepared.run`. The operator was prepared."""
        with torch.inference_mode():
            return self._prepared[name].run(begin, end)

    def close(self) -> None:
        """End the peer of the all-reduce."""
        if self._ring is not None:
            self._ring.close()
