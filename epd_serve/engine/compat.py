"""What differs between vLLM versions and platforms, looked up in one place. Nothing else here checks a version."""

from __future__ import annotations

import torch


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
