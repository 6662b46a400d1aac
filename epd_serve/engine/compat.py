"""What differs between vLLM versions and platforms, looked up in one place. Nothing else here checks a version."""

from __future__ import annotations

import logging
import time

import torch

logger = logging.getLogger(__name__)

_YIELD_S = 1e-4


def tp_rank() -> int:
    """Tensor-parallel rank of this worker."""
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def platform_fingerprint() -> str:
    """What decides how KV bytes are laid out beyond shapes: vLLM's version, the device type, the CPU's ISA."""
    import vllm
    from vllm.platforms import current_platform

    device = current_platform.device_type
    isa = torch.backends.cpu.get_cpu_capability() if device == "cpu" else current_platform.get_device_name()
    return f"vllm {vllm.__version__}, {device}, {isa}"


def sleep_between_steps() -> None:
    """Let idle workers sleep instead of spin, where stages share cores (CPU).

    After every step vLLM's message queues call `sched_yield` in a loop for a second
    (`distributed/device_communicators/shm_broadcast.py`, SpinCondition). With a core per process that saves
    microseconds; with three stages on two cores it takes the time that the next stage needs.
    """
    from vllm.distributed.device_communicators import shm_broadcast

    if hasattr(shm_broadcast, "sched_yield"):
        shm_broadcast.sched_yield = lambda: time.sleep(_YIELD_S)
    else:
        logger.warning("this vLLM waits differently between steps; idle stages may take cores from busy ones")
