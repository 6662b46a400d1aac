"""Carries out the core order of a stage in its workers: where in vLLM's start that happens. How is `npu_ops`'s.

Our vLLM plugin calls `obey` in every process of a stage before a device is set. When a worker initialises its device,
one on CPU or CUDA reads back what it got, and one on an NPU makes sure that its limit was set on the way.
"""

from __future__ import annotations

import logging
import os

from epd_serve.engine.argv import CORE_SHARE_ENV
from epd_serve.engine.worker_start import around_init_device, stepped_in
from npu_ops.core_grants import CoreGrant, CoreOrder
from npu_ops.core_limits import CoreLimitError, cpu_grant, cuda_grant, limit_at_set_device, report

logger = logging.getLogger(__name__)

_NAME = "core share"


def obey() -> None:
    """Install what the order in the environment needs. Nothing without one."""
    text = os.environ.get(CORE_SHARE_ENV)
    if text is None or stepped_in(_NAME):
        return
    order = CoreOrder.from_json(text)
    if order.device == "npu":
        _obey_on_npu(order)
    elif order.device == "cuda":
        around_init_device(_NAME, after=lambda rank: _told(order, cuda_grant(rank, order)))
    else:
        # Before: initialising computes, and the threads of an OpenMP team are told from others when they come to be.
        around_init_device(_NAME, before=lambda rank: _told(order, cpu_grant(rank, order)))


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
    around_init_device(_NAME, after=check)


def _told(order: CoreOrder, grant: CoreGrant) -> None:
    try:
        report(order, grant)
    except OSError as error:
        logger.warning("%s cannot say which cores it got: %s", order.instance, error)
    logger.info("core share %g of %s: %s", grant.share, order.instance, grant.summary())
