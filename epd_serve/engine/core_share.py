"""Carries out the core order of a stage in its workers: where in vLLM's start that happens. How is `npu_ops`'s.

Our vLLM plugin calls `obey` in every process of a stage before a device is set. Workers are those that initialise a
device (`WorkerWrapperBase.init_device`, on every platform, before a model is loaded): there a worker on CPU or CUDA
reads back what it got, and one on an NPU makes sure that its limit was set on the way.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable

from epd_serve.engine.argv import CORE_SHARE_ENV
from npu_ops.core_grants import CoreGrant, CoreOrder
from npu_ops.core_limits import CoreLimitError, cpu_grant, cuda_grant, limit_at_set_device, report

logger = logging.getLogger(__name__)

_OBEYS = "obeys_core_share"  # vLLM may load a plugin twice


def obey() -> None:
    """Install what the order in the environment needs. Nothing without one."""
    text = os.environ.get(CORE_SHARE_ENV)
    if text is None:
        return
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    if hasattr(WorkerWrapperBase.init_device, _OBEYS):
        return
    order = CoreOrder.from_json(text)
    if order.device == "npu":
        _obey_on_npu(order)
    elif order.device == "cuda":
        _around_init_device(after=lambda rank: _told(order, cuda_grant(rank, order)))
    else:
        # Before: initialising computes, and the threads of an OpenMP team are told from others when they come to be.
        _around_init_device(before=lambda rank: _told(order, cpu_grant(rank, order)))


def _obey_on_npu(order: CoreOrder) -> None:
    grants: list[CoreGrant] = []

    def granted(grant: CoreGrant) -> None:
        grants.append(grant)
        _told(order, grant)

    def check(rank: int) -> None:
        if not grants:
            raise CoreLimitError(
                f"worker {rank} of {order.instance} initialised its NPU without torch.npu.set_device, so it has no "
                "core limit: this vllm-ascend works differently; remove --core-share"
            )

    limit_at_set_device(order, granted)
    _around_init_device(after=check)


def _told(order: CoreOrder, grant: CoreGrant) -> None:
    try:
        report(order, grant)
    except OSError as error:
        logger.warning("%s cannot say which cores it got: %s", order.instance, error)
    logger.info("core share %g of %s: %s", grant.share, order.instance, grant.words())


def _around_init_device(
    before: Callable[[int], None] = lambda rank: None, after: Callable[[int], None] = lambda rank: None
) -> None:
    """Have each worker call these with its rank, on the thread on which the model will run."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    real = WorkerWrapperBase.init_device

    @functools.wraps(real)
    def init_device(self: WorkerWrapperBase) -> None:
        before(self.rpc_rank)
        real(self)
        after(self.rpc_rank)

    setattr(init_device, _OBEYS, True)
    WorkerWrapperBase.init_device = init_device
