"""Runs operators of `operators.py` on one device, over and over, and says when each sample began and ended.

They are torch's own calls, so that the vendor's kernels run: the same code on cpu, cuda and npu, and on an accelerator
it has never run. Owns the process's device, its threads and its share of the cores. Who runs beside it is the
measurement's business.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
from torch.nn import functional

from bench.micro.interference.operators import Sizes
from bench.micro.interference.ring import Ring, dtype_of
from npu_ops.core_grants import CoreGrant, CoreOrder
from npu_ops.core_limits import cpu_grant, cuda_grant, limit_npu
from npu_ops.memory import DeviceMemory
from npu_ops.torch_memory import open_memory

Call = Callable[[], object]
"""Queues the operator once on the device."""

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


def call_of(name: str, sizes: Sizes, device: torch.device, ring: Ring | None = None) -> Call:
    """The operator `name` with its tensors on `device`, which the calling thread has set.

    Args:
        ring: joins the ranks of an all-reduce; only that needs one.
    """
    s = sizes
    if name == "encoder_matmul":
        left, right = (
            _random(device, s.encoder_tokens, s.encoder_width),
            _random(device, s.encoder_width, s.encoder_inner),
        )
        return _matmul(left, right)
    if name == "prefill_matmul":
        return _matmul(_random(device, s.prompt_tokens, s.width), _random(device, s.width, s.inner))
    if name == "prefill_attention":
        query, key, value = (_random(device, 1, s.heads, s.prompt_tokens, s.head_dim) for _ in range(3))
        return lambda: functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    if name == "decode_matmul":
        rows, weights = _random(device, s.batch, s.width), _random(device, s.decode_layers, s.width, s.inner)
        out = torch.empty(s.batch, s.inner, dtype=rows.dtype, device=device)
        layers = weights.unbind()

        def step() -> None:
            for weight in layers:
                torch.mm(rows, weight, out=out)

        return step
    if name == "decode_attention":
        # Grouped queries: those that share a KV head are rows of one small matrix, and there is no causal mask.
        query = _random(device, s.batch, s.kv_heads, s.heads // s.kv_heads, s.head_dim)
        key, value = (_random(device, s.batch, s.kv_heads, s.context, s.head_dim) for _ in range(2))
        return lambda: functional.scaled_dot_product_attention(query, key, value)
    if name == "norm":
        rows, weight = _random(device, s.prompt_tokens, s.width), _random(device, s.width)
        return lambda: functional.layer_norm(rows, (s.width,), weight)
    if name == "elementwise":
        gate, up = (_random(device, s.prompt_tokens, s.inner) for _ in range(2))
        return lambda: functional.silu(gate).mul_(up)
    if name in ("memory_copy", "copy_to_device", "copy_to_host"):
        return _copy(name, s.copy_bytes, device)
    if name == "all_reduce":
        assert ring is not None, "an all-reduce needs its peer"
        return ring.call(s.reduce_bytes)
    raise ValueError(f"no operator {name!r}")


def _random(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=device, dtype=dtype_of(device.type))


def _matmul(left: torch.Tensor, right: torch.Tensor) -> Call:
    out = torch.empty(left.shape[0], right.shape[1], dtype=left.dtype, device=left.device)
    return lambda: torch.mm(left, right, out=out)


def _copy(name: str, nbytes: int, device: torch.device) -> Call:
    here = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    if name == "memory_copy":
        other = torch.ones(nbytes, dtype=torch.uint8)
        return lambda: other.copy_(here)
    host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=True)  # as what the stages send from and receive into
    target, source = (here, host) if name == "copy_to_device" else (host, here)
    return lambda: target.copy_(source, non_blocking=True)
