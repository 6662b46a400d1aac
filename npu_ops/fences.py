"""Fences: "what was queued on this device so far is done", recorded by one thread and waited for by another."""

from __future__ import annotations

from collections.abc import Callable

import torch


def _nothing() -> None:
    return None


def fence(device: torch.device) -> Callable[[], None]:
    """Record a fence on the current stream of `device`; the returned function waits for it, in any thread.

    The wait sets the device for its thread first, as Ascend demands of every thread that touches an NPU. CPU ops are
    synchronous, so there is nothing to wait for.
    """
    if device.type == "cpu":
        return _nothing
    module = getattr(torch, device.type)  # torch.cuda, or torch.npu once torch_npu is imported by vllm-ascend
    event = module.Event()
    event.record()

    def wait() -> None:
        module.set_device(device)
        event.synchronize()

    return wait
