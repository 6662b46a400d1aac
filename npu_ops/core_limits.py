"""Holds a worker process to its share of a device's cores, and reads back what it got. Called in the worker itself.

- NPU: `torch.npu.set_device_limit`, per process, right after the process's first `set_device` and before any operation.
  `get_device_limit` is compared with what was set: a difference ends the worker.
- CUDA: the MPS server (`mps.py`), by the environment that the process started with. Read back is how many SMs the
  device says it has, which MPS counts per process.
- CPU: affinity of the OpenMP threads. That of the threads that compute is read back: one that may run elsewhere ends
  the worker. It alone may become another one while a worker runs (`core_grants.why_fixed`).

NPU and CUDA: written against torch_npu 2.10's sources and NVIDIA's manual; neither has run on a card.

NPU contract (torch_npu 2.10, `npu/npu_config.py`): `set_device_limit(device: int, cube_num=-1, vector_num=-1)` may be
called once per process, a second call raises, so both kinds go in one; `get_device_limit(device: int)` gives
`{"cube_core_num": int, "vector_core_num": int}`, of the whole device as long as no limit is set. The limit is a count,
not a placement: which cores, the runtime decides. It ends with the process, so a dead stage frees its share.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from typing import Any, Protocol

from npu_ops.core_grants import CoreGrant, CoreOrder, write_grant
from npu_ops.core_sets import TooFewCoresError, apportion
from npu_ops.openmp import move_threads, team

_KINDS = {"cube": "cube_core_num", "vector": "vector_core_num"}
_FIX = "correct or remove --core-share"


class CoreLimitError(RuntimeError):
    """A worker does not have the cores it should have; it ends before it loads a model."""


class NpuModule(Protocol):
    """What is called of `torch.npu`."""

    set_device: Callable[[Any], None]

    def current_device(self) -> int: ...

    def set_device_limit(self, device: int, cube_num: int = -1, vector_num: int = -1) -> None: ...

    def get_device_limit(self, device: int) -> dict[str, int]: ...


def limit_at_set_device(
    order: CoreOrder, granted: Callable[[CoreGrant], None], module: NpuModule | None = None
) -> None:
    """Have the process's next `torch.npu.set_device` be followed by the limit, before its caller can run an operation.

    `granted` is called with what was read back, in that thread.

    vllm-ascend's worker sets its device as the first thing it does with it (`NPUWorker._init_device`), by this very
    name. A worker class of ours (`--worker-cls`) would do, too, but replaces vllm-ascend's choice between its own.
    """
    npu = module if module is not None else _torch_npu()
    real = npu.set_device

    @functools.wraps(real)
    def set_device(device: Any) -> None:
        real(device)
        if npu.set_device is set_device:  # threads of the worker set it again, later
            npu.set_device = real
            granted(limit_npu(npu, npu.current_device(), order))

    npu.set_device = set_device


def _torch_npu() -> NpuModule:
    import torch

    return torch.npu


def limit_npu(npu: NpuModule, device: int, order: CoreOrder) -> CoreGrant:
    """Limit this process to its share of the device's cores. The device is set, nothing has run on it.

    Raises:
        CoreLimitError: the runtime has no limits or does not say how many cores there are, there are too few, or what
            is read back is not what was set.
    """
    total = _npu_limit(npu, device)
    if min(total.values()) < 1:
        raise CoreLimitError(f"NPU {device} does not say how many cores it has ({total}): {_FIX}")
    limit = whole_cores(total, order)
    try:
        npu.set_device_limit(device, limit["cube"], limit["vector"])
    except Exception as error:
        raise CoreLimitError(f"NPU {device} takes no core limit {limit}: {_one_line(error)}; {_FIX}") from error
    got = _npu_limit(npu, device)
    if got != limit:
        raise CoreLimitError(f"NPU {device} has a core limit of {got} where {limit} was set: {_FIX}")
    return CoreGrant(device, order.share, got, total)


def whole_cores(total: dict[str, int], order: CoreOrder) -> dict[str, int]:
    """Cores of each kind for this instance; those of all instances on the device together are no more than it has.

    An AI core of an A2 is one cube core and two vector cores, and kernels that use both want them in that ratio: whole
    AI cores are given as long as there are enough of them.

    Raises:
        CoreLimitError: fewer cores than instances.
    """
    shares, at = list(order.shares.values()), list(order.shares).index(order.instance)
    groups = math.gcd(*total.values())
    try:
        if groups >= len(shares):
            mine = apportion(groups, shares)[at]
            return {kind: mine * count // groups for kind, count in total.items()}
        return {kind: apportion(count, shares)[at] for kind, count in total.items()}
    except TooFewCoresError as error:
        raise CoreLimitError(f"the device has {total} cores for {len(shares)} stages: {error}; {_FIX}") from error


def _npu_limit(npu: NpuModule, device: int) -> dict[str, int]:
    try:
        limit = npu.get_device_limit(device)
        return {kind: int(limit[key]) for kind, key in _KINDS.items()}
    except Exception as error:
        raise CoreLimitError(f"NPU {device} does not say how many cores it has: {_one_line(error)}; {_FIX}") from error


def cuda_grant(rank: int, order: CoreOrder) -> CoreGrant:
    """What MPS left this process: under it the device says how many SMs the process may use. The device is set."""
    import torch

    count = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    return CoreGrant(rank, order.share, {"sm": int(count)}, enforced=order.enforced)


def cpu_grant(rank: int, order: CoreOrder) -> CoreGrant:
    """The cores that the calling thread's OpenMP team computes on. The team is made here if there is none yet.

    Raises:
        CoreLimitError: one of its threads may run elsewhere.
    """
    cores = tuple(sorted({core for thread in team() for core in _affinity(thread)}))
    if not set(cores) <= set(order.cores):
        raise CoreLimitError(
            f"computing threads run on cores {list(cores)}, not on {list(order.cores)} alone: is "
            f"VLLM_CPU_OMP_THREADS_BIND or an OpenMP variable set for this stage? Unset it, or {_FIX}"
        )
    return CoreGrant(rank, order.share, {"cpu": len(cores)}, core_ids=cores)


def moved_cpu_grant(rank: int, before: CoreOrder, order: CoreOrder) -> CoreGrant:
    """Have all threads of this worker that compute on the cores of `before` compute on those of `order` from now on.

    How many threads compute, the model's own thread has to change between two of its steps
    (`npu_ops.openmp.set_team_size`). Whoever has asked for it compares what is read back here.
    """
    moved = move_threads(before.cores, order.cores)
    cores = tuple(sorted({core for thread in moved for core in _affinity(thread)}))
    return CoreGrant(rank, order.share, {"cpu": len(cores)}, core_ids=cores)


def report(order: CoreOrder, grant: CoreGrant) -> None:
    """Leave the grant where the launcher looks for it."""
    if order.report:
        write_grant(order.report, grant)


def _affinity(thread: int) -> set[int]:
    try:
        return os.sched_getaffinity(thread)
    except ProcessLookupError:  # it has ended
        return set()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
